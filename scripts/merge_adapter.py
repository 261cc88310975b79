"""Merges a LoRA adapter into its base: python scripts/merge_adapter.py <adapter folder> <new folder> [--base <model>].

Every run writes its merged model already; this is for adapters on their own. Needs host memory for one model.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from peft import AutoPeftModelForCausalLM, AutoPeftModelForSequenceClassification, PeftConfig
from transformers import AutoTokenizer


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("adapter", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--base", help="another copy of the base model than the one the adapter names")
    arguments = parser.parse_args()
    if not (arguments.adapter / "adapter_config.json").is_file():
        print(f"{arguments.adapter} holds no adapter_config.json; give the adapter folder of a run", file=sys.stderr)
        return 2
    if arguments.output.exists():
        print(f"{arguments.output} exists; give a folder that does not", file=sys.stderr)
        return 2
    config = PeftConfig.from_pretrained(arguments.adapter)
    if arguments.base is not None:
        config.base_model_name_or_path = arguments.base
    if config.task_type == "SEQ_CLS":
        model = AutoPeftModelForSequenceClassification.from_pretrained(
            arguments.adapter, config=config, dtype=torch.float32, num_labels=1
        )
    else:
        model = AutoPeftModelForCausalLM.from_pretrained(arguments.adapter, config=config, dtype=torch.float32)
    model.merge_and_unload().save_pretrained(arguments.output)
    AutoTokenizer.from_pretrained(config.base_model_name_or_path).save_pretrained(arguments.output)
    print(f"merged into {arguments.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

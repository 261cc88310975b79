"""Models by family: shapes and names without torch (families), building with transformers and peft (build), saving
(export)."""

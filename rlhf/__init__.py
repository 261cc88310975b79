"""RLHF experiments: SFT, reward model and PPO on one of several frameworks, with every byte accounted for."""

"""ReplaySSM through FlashInfer: the call itself, and what its one slot a row leaves to be done."""

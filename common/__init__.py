"""What several of Baton's processes share: the contract between them, process plumbing and the engine."""

"""vLLM as a generator: in this process, and as a server. `vllm` itself is imported where an engine starts."""

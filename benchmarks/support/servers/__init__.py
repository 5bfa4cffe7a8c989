"""vLLM and SGLang as servers: their processes, models and weight updates, and the drills of their faults."""

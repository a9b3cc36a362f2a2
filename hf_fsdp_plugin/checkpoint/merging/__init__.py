"""Any checkpoint -> a Hugging Face folder, streamed. No torch."""

"""Agents that know nothing of us reach the model here, over OpenAI's protocol."""

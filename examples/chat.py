"""Streams one answer with the openai package (pip install openai). Usage: python examples/chat.py "Why is the sky blue?" """

import os
import sys

from openai import OpenAI

client = OpenAI(base_url=os.environ.get("BATON_URL", "http://127.0.0.1:8080/v1"), api_key=os.environ.get("BATON_API_KEY", "none"))
stream = client.chat.completions.create(
    model=os.environ.get("BATON_MODEL", "smollm2"),
    messages=[{"role": "user", "content": sys.argv[1] if len(sys.argv) > 1 else "Why is the sky blue?"}],
    stream=True,
)
for chunk in stream:
    print(chunk.choices[0].delta.content or "", end="", flush=True)
print()

"""A chat with the local stack through the `openai` package, printed as the tokens arrive.

make serve                                    # in another terminal
.venv/bin/python examples/openai_client.py [--url http://127.0.0.1:8000] ["a question"]
"""

from __future__ import annotations

import argparse

from openai import OpenAI

QUESTION = "The code of Mira is 4817. The code of Otto is 2093. What is the code of Mira?"


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description="stream one answer of a chat")
    parser.add_argument("question", nargs="?", default=QUESTION)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    options = parser.parse_args()
    # A gateway without API keys accepts any key, but the client insists on one.
    with OpenAI(base_url=f"{options.url}/v1", api_key="unused") as client:
        model = client.models.list().data[0].id
        stream = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": options.question}],
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        for chunk in stream:
            for choice in chunk.choices:
                print(choice.delta.content or "", end="", flush=True)
            if chunk.usage is not None:
                print(f"\n{chunk.usage.prompt_tokens} tokens in, {chunk.usage.completion_tokens} out")


if __name__ == "__main__":
    main()

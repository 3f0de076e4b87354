"""What the clients ask the demo model, and what it must answer."""

from __future__ import annotations

from typing import Any

FACTS = "The code of Mira is 4817. The code of Otto is 2093."
QUESTION = "What is the code of Mira?"
PROMPT = f"{FACTS} {QUESTION}"
ANSWER = "4817"
MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": PROMPT}]

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "What is known of somebody",
        "parameters": {
            "type": "object",
            "properties": {"name": {"type": "string", "enum": ["Mira", "Otto"]}},
            "required": ["name"],
            "additionalProperties": False,
        },
    },
}
TOOL_RESULT = PROMPT
"""With the question, which this model must read behind the facts."""

CODE_SCHEMA: dict[str, Any] = {
    "title": "code",
    "description": "A code of four digits",
    "type": "object",
    "properties": {"code": {"type": "string", "pattern": "^[0-9]{4}$"}},
    "required": ["code"],
    "additionalProperties": False,
}

FREQUENCY_PENALTY = 2.0
"""For what a grammar forces: this model has never seen JSON, and would go on with white space."""

TOO_LONG = "hello " * 3000
"""More tokens than the demo model's context of 2,048 has."""

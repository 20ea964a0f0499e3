"""Reviews a submission with two models at once (pip install openai), and combines their replies.

One model lists mistakes. The other grades on a fixed scale, as JSON that follows a schema. Baton runs the two requests on
different nodes at the same time, so the review takes as long as the slower one.

Usage: python examples/review.py FILE, or the text on standard input. BATON_MODELS names the two models, separated by a
comma; a single model gets both requests.
"""

import asyncio
import json
import os
import sys

from openai import AsyncOpenAI

client = AsyncOpenAI(
    base_url=os.environ.get("BATON_URL", "http://127.0.0.1:8080/v1"), api_key=os.environ.get("BATON_API_KEY", "none")
)
critic, judge = (os.environ.get("BATON_MODELS", "smollm2").split(",") * 2)[:2]

VERDICT = {
    "type": "object",
    "properties": {
        "verdict": {"enum": ["accept", "revise", "reject"]},
        "clarity": {"type": "integer", "minimum": 1, "maximum": 5},
        "correctness": {"type": "integer", "minimum": 1, "maximum": 5},
    },
    "required": ["verdict", "clarity", "correctness"],
    "additionalProperties": False,
}


async def ask(model, task, submission, **settings):
    messages = [{"role": "system", "content": task}, {"role": "user", "content": submission}]
    reply = await client.chat.completions.create(model=model, messages=messages, max_tokens=200, **settings)
    return reply.choices[0].message.content


async def review(submission):
    form = {"type": "json_schema", "json_schema": {"name": "verdict", "strict": True, "schema": VERDICT}}
    remarks, verdict = await asyncio.gather(
        ask(critic, "Name the weaknesses of this submission in at most three sentences.", submission),
        ask(judge, "Judge this submission. Grades go from 1 to 5.", submission, response_format=form),
    )
    return {"remarks": remarks, "remarks_by": critic, **json.loads(verdict), "verdict_by": judge}


if __name__ == "__main__":
    with open(sys.argv[1]) if len(sys.argv) > 1 else sys.stdin as file:
        print(json.dumps(asyncio.run(review(file.read())), indent=2))

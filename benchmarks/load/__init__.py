"""`baton bench`: puts load on any OpenAI-compatible endpoint, and reports the results.

Life of a run:

1. `settings`: the options, validated. `endpoint`: checks that the endpoint answers, and asks for its model.
2. `plan`: arrival times (`arrivals`), lengths (`lengths`), prompts (`prompts`, `trace`), all drawn from the seed alone.
3. `encode`: every request's body as bytes, before the first one is sent.
4. `runner`: sends each conversation at its time, whether earlier ones have ended or not (open loop), or, under a cap,
   as soon as there is room. `client`: one request; `sse`, `chunk`: the content of its stream, stamped when the bytes
   arrive.
5. `record`: the times and counts that are kept of a request. `summary`: every figure, from the records alone, so that a
   file with a timeline gives the same figures again.
6. `results`, `tables`, `plots`: the file, the terminal, the pictures. `sweep`: runs at many rates.

It uses nothing of the product except what surrounds its processes (options, exit codes, signals, open files), so it can
measure other systems, too.
"""

"""From a request's body to a job: check its form, tokenise its prompts, and build the grammar that its answer must
follow."""

"""An answer on its way out: a request's generations as one stream of pieces, worded in the OpenAI API's formats."""

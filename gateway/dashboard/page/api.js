// The gateway's HTTP API: the key, errors in its shape, server-sent events.

const KEY_NAME = 'baton-api-key';

export function apiKey() {
  try {
    return sessionStorage.getItem(KEY_NAME) ?? '';
  } catch {
    return ''; // storage is forbidden here: without a key, then
  }
}

export function keepApiKey(key) {
  try {
    if (key) sessionStorage.setItem(KEY_NAME, key);
    else sessionStorage.removeItem(KEY_NAME);
  } catch { /* as above */ }
}

/** A refusal or a failure, as the API words it. */
export class ApiError extends Error {
  constructor(status, error = {}, retryAfterS = null) {
    super(error.message || `the gateway answered with status ${status}`);
    this.status = status;
    this.code = error.code ?? null;
    this.retryAfterS = retryAfterS;
  }

  static async from(response) {
    let error = {};
    try {
      error = (await response.json()).error ?? {};
    } catch { /* not from the gateway: the status has to do */ }
    const retryAfterS = Number(response.headers.get('Retry-After')) || null;
    return new ApiError(response.status, error, retryAfterS);
  }
}

/** `fetch` with the key. Throws `ApiError` for any status that is no success. */
export async function request(path, options = {}) {
  const headers = { ...options.headers };
  const key = apiKey();
  if (key) headers.Authorization = `Bearer ${key}`;
  const response = await fetch(path, { ...options, headers, cache: 'no-store' });
  if (!response.ok) throw await ApiError.from(response);
  return response;
}

/** POST a JSON body and get the events of the answer. */
export async function stream(path, body, signal) {
  const response = await request(path, {
    method: 'POST',
    headers: { 'Content-Type': 'application/json' },
    body: JSON.stringify(body),
    signal,
  });
  return events(response);
}

/** The data of a response's server-sent events, as text. Leaving the loop closes the connection. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = '';
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const parts = (rest + value).split('\n\n');
      rest = parts.pop();
      for (const part of parts) {
        let data = '';
        for (const line of part.split('\n')) if (line.startsWith('data: ')) data += line.slice(6);
        yield data;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** The pieces of an answer: `{text, reasoning, finishReason, usage}`. Throws `ApiError` when it breaks off. */
export async function* pieces(chatEvents) {
  for await (const data of chatEvents) {
    if (data === '[DONE]') return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(200, chunk.error);
    const choice = chunk.choices[0];
    yield {
      text: choice?.delta?.content ?? '',
      reasoning: choice?.delta?.reasoning_content ?? '',
      finishReason: choice?.finish_reason ?? null,
      usage: chunk.usage ?? null,
    };
  }
  throw new ApiError(200, { message: 'the stream broke off' });
}

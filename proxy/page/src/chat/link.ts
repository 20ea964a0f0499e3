/** Links that open a chat with certain models and a prompt, for example two models side by side: `#try?model=a&model=b&prompt=…`. */

export interface Asked {
  models: string[];
  prompt: string;
}

/** Browsers and chats cut longer addresses. */
const MAX_LINK = 8_000;

/** What an address asks for, or null. Nothing is sent before the reader does it. */
export function askedBy(hash: string): Asked | null {
  const [view, query] = hash.replace(/^#/, '').split('?', 2);
  if (view !== 'try' || !query) return null;
  const said = new URLSearchParams(query);
  const models = said.getAll('model').filter(Boolean).slice(0, 2);
  return { models, prompt: (said.get('prompt') ?? '').slice(0, MAX_LINK) };
}

/** The address of a prompt to these models, or null if it is too long. */
export function linkTo({ models, prompt }: Asked, address: string): string | null {
  const query = new URLSearchParams([...models.map((model) => ['model', model]), ['prompt', prompt]]);
  const link = `${address.replace(/#.*$/, '')}#try?${query}`;
  return link.length <= MAX_LINK ? link : null;
}

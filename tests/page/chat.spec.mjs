// What a chat sends, and when a reply counts as complete.
import { readFile } from 'node:fs/promises';
import { answerStreams, expect, expectAccessible, expectNoSidewaysScroll, test } from './browser.mjs';

const SIM = ['--engine', 'sim', '--name', 'sim'];
const DONE = 'data: [DONE]';
const message = (page) => page.getByLabel('Message', { exact: true });
const said = (text) => `data: ${JSON.stringify({ choices: [{ delta: { content: text } }] })}`;

/** Answers chats with these replies, one after another; the last one again and again. Returns the bodies that were sent. */
async function answerChats(page, ...replies) {
  const sent = [];
  await page.route('**/v1/chat/completions', (route) => {
    sent.push(route.request().postDataJSON());
    const lines = replies[Math.min(sent.length, replies.length) - 1];
    route.fulfill({ headers: { 'content-type': 'text/event-stream' }, body: lines.map((line) => `${line}\n\n`).join('') });
  });
  return sent;
}

test('a reply that broke off is an error, and the next request is sent without it', async ({ page, problems, cluster }) => {
  const { url } = await cluster.serve('--engine', 'sim', '--name', 'sim');
  const sent = [];
  const answers = [
    ['data: {"choices":[{"delta":{"content":"One."}}]}', 'data: [DONE]'],
    ['data: {"choices":[{"delta":{"content":"Tw"}}]}'],
    ['data: {"error":{"message":"It failed."}}'],
    ['data: {"choices":[{"delta":{"content":"Four."}}]}', 'data: [DONE]'],
  ];
  await page.route('**/v1/chat/completions', (route) => {
    sent.push(route.request().postDataJSON().messages.map((message) => message.content));
    route.fulfill({ headers: { 'content-type': 'text/event-stream' }, body: answers[sent.length - 1].map((line) => `${line}\n\n`).join('') });
  });
  await page.goto(`${url}/#try`);
  const say = async (text) => {
    await page.getByLabel('Message', { exact: true }).fill(text);
    await page.getByRole('button', { name: 'Send' }).click();
  };
  const last = page.locator('.turn.assistant').last();
  await say('1?');
  await expect(last).toContainText('One.');
  await expect(last.getByRole('alert')).toHaveCount(0);
  await say('2?');
  await expect(last.getByRole('alert')).toHaveText('The reply broke off: the stream ended without its last event.');
  await expect(last).toContainText('Tw');
  await say('3?');
  await expect(last.getByRole('alert')).toHaveText('It failed.');
  await say('4?');
  await expect(last).toContainText('Four.');
  expect(sent).toEqual([['1?'], ['1?', 'One.', '2?'], ['1?', 'One.', '3?'], ['1?', 'One.', '4?']]);
  expect(problems).toEqual([]);
});

test('the route of a reply that waited is shown as soon as the stream names it', async ({ page, problems, cluster }) => {
  const { url } = await cluster.serve('--engine', 'sim', '--name', 'sim');
  await page.route('**/v1/chat/completions', (route) => {
    const events = [': place 1 in the queue', ': x-baton-route: direct; decode=late; policy=fastest; reason=only_route', 'data: {"choices":[{"delta":{"content":"One."}}]}', 'data: [DONE]'];
    route.fulfill({
      headers: { 'content-type': 'text/event-stream', 'x-baton-route': 'pending; place=2' },
      body: events.map((event) => `${event}\n\n`).join(''),
    });
  });
  await page.goto(`${url}/#try`);
  await page.getByLabel('Message', { exact: true }).fill('1?');
  await page.getByRole('button', { name: 'Send' }).click();
  await expect(page.locator('.route-of')).toContainText('late · only route');
  await expect(page.locator('.route-of')).not.toContainText('pending');
  expect(problems).toEqual([]);
});

const MARKDOWN = `# Primes

A *list* of **facts** &amp; \`code\`, a [page](https://example.org/), a [trap](javascript:alert(1)) and ![a picture](https://example.org/x.png).

1. one
2. two

| n | prime |
|---|---:|
| 2 | yes |

\`\`\`rust
fn is_prime(n: u32) -> bool { n == 2 } // not yet
\`\`\`

<img src=x onerror="alert(1)">`;

test('a reply is Markdown with code to copy, and no text of a model becomes HTML', async ({ page, problems, cluster, context }) => {
  const { url } = await cluster.serve(...SIM);
  await context.grantPermissions(['clipboard-read', 'clipboard-write']);
  const usage = { choices: [], usage: { prompt_tokens: 1_200, completion_tokens: 90, prompt_tokens_details: { cached_tokens: 800 } }, timings: { predicted_n: 90, predicted_per_second: 45 } };
  const sent = await answerChats(page, [said(MARKDOWN), `data: ${JSON.stringify(usage)}`, DONE]);
  await page.goto(`${url}/#try`);
  await message(page).fill('Primes?');
  await message(page).press('Enter');
  const reply = page.locator('.turn.assistant').last();
  await expect(reply.locator('h4')).toHaveText('Primes');
  await expect(reply.locator('.markdown > p').first()).toContainText('A list of facts & code, a page, a trap (javascript:alert(1)) and picture: a picture.');
  await expect(reply.locator('a')).toHaveText(['page', 'picture: a picture']);
  await expect(reply.locator('ol li')).toHaveText(['one', 'two']);
  await expect(reply.locator('td')).toHaveText(['2', 'yes']);
  await expect(reply.locator('.hljs-keyword').first()).toHaveText('fn');
  await expect(reply.locator('.markdown')).toContainText('<img src=x onerror="alert(1)">');
  await expect(reply.locator('img')).toHaveCount(0);
  await expect(reply.locator('.route-of')).toContainText('1,200 tokens of prompt, 800 cached90 tokens45 tok/s');
  for (const [button, text] of [['Copy the code', 'fn is_prime(n: u32) -> bool { n == 2 } // not yet'], ['Copy the reply', MARKDOWN]]) {
    await reply.getByRole('button', { name: button }).click();
    await expect(reply.getByRole('button', { name: button.replace('Copy', 'Copied') })).toBeVisible();
    expect(await page.evaluate(() => navigator.clipboard.readText())).toBe(text);
  }
  for (const colorScheme of ['light', 'dark']) {
    await page.emulateMedia({ colorScheme });
    await expectAccessible(page, `Markdown, ${colorScheme}`);
  }
  expect(sent.length).toBe(1);
  expect(problems).toEqual([]);
});

test('messages are changed, asked again and sent with pictures and files, by choosing, dropping and pasting', async ({ page, problems, cluster }) => {
  const { url } = await cluster.serve(...SIM);
  const sent = await answerChats(page, [said('One.'), DONE], [said('Two.'), DONE], [said('Again.'), DONE], [said('Changed.'), DONE]);
  await page.goto(`${url}/#try`);
  const png = Buffer.from('iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg==', 'base64');
  await page.getByLabel('Attach pictures or text files').setInputFiles([{ name: 'dot.png', mimeType: 'image/png', buffer: png }]);
  const give = (kind, name, text) =>
    message(page).evaluate(
      (area, { kind, name, text }) => {
        const data = new DataTransfer();
        data.items.add(new File([text], name, { type: 'text/plain' }));
        const event = kind === 'drop' ? new DragEvent('drop', { dataTransfer: data, bubbles: true, cancelable: true }) : new ClipboardEvent('paste', { clipboardData: data, bubbles: true, cancelable: true });
        area.dispatchEvent(event);
      },
      { kind, name, text },
    );
  await give('drop', 'a.txt', 'with ``` a fence');
  await expect(page.locator('.ask .attached li')).toHaveCount(2);
  await give('paste', 'b.txt', 'pasted');
  await expect(page.locator('.ask .attached li')).toHaveCount(3);
  await page.getByLabel('Attach pictures or text files').setInputFiles([{ name: 'c.bin', mimeType: 'application/octet-stream', buffer: Buffer.from([0xff, 0xfe, 0]) }]);
  await expect(page.getByRole('alert')).toHaveText('“c.bin” is neither a picture (PNG, JPEG, WebP, GIF) nor text in UTF-8.');
  await page.getByRole('button', { name: 'Remove b.txt' }).click();
  await message(page).fill('1?');
  await message(page).press('Enter');
  const last = page.locator('.turn.assistant').last();
  await expect(last).toContainText('One.');
  await expect(page.locator('.turn.user img')).toHaveAttribute('alt', 'dot.png');
  expect(sent[0].messages).toEqual([
    {
      role: 'user',
      content: [
        { type: 'text', text: 'a.txt:\n````\nwith ``` a fence\n````\n\n1?' },
        { type: 'image_url', image_url: { url: `data:image/png;base64,${png.toString('base64')}` } },
      ],
    },
  ]);

  await page.locator('.settings summary').click();
  await page.getByLabel('System message').fill('Be short.');
  await page.getByLabel('Top p').fill('0.5');
  await page.getByLabel('Seed').fill('7');
  await message(page).fill('2?');
  await message(page).press('Enter');
  await expect(last).toContainText('Two.');
  expect([sent[1].top_p, sent[1].seed, sent[1].messages[0]]).toEqual([0.5, 7, { role: 'system', content: 'Be short.' }]);
  await last.getByRole('button', { name: 'Regenerate' }).click();
  await expect(last).toContainText('Again.');
  expect(sent[2]).toEqual(sent[1]);
  await page.locator('.turn.user').first().getByRole('button', { name: 'Edit' }).click();
  await page.getByLabel('The message, changed').fill('3?');
  await page.getByRole('button', { name: 'Send instead' }).click();
  await expect(last).toContainText('Changed.');
  await expect(page.locator('.turn')).toHaveCount(2);
  expect(sent[3].messages.length).toBe(2);
  expect(sent[3].messages[1].content[0].text).toContain('3?');
  expect(problems).toEqual([]);
});

test('chats stay in this browser until they are deleted, and can be exported', async ({ page, problems, cluster }) => {
  const { url } = await cluster.serve(...SIM);
  await answerChats(page, [said('One.'), DONE]);
  await page.goto(`${url}/#try`);
  const ask = async (text) => {
    await message(page).fill(text);
    await message(page).press('Enter');
    await expect(page.locator('.turn.assistant').last()).toContainText('One.');
    await expect(page.getByRole('button', { name: 'Send' })).toBeVisible();
  };
  await ask('What is a relay?');
  await page.getByRole('button', { name: 'New chat' }).click();
  await ask('What is a baton?');
  await page.reload();
  await expect(page.locator('.turn')).toHaveCount(0);
  const list = page.locator('.history');
  await list.locator('summary').click();
  await expect(list.locator('.title')).toHaveText([/What is a baton\?/, /What is a relay\?/]);
  await list.getByRole('button', { name: /^What is a relay\?/ }).click();
  await expect(page.locator('.turn.user .text')).toHaveText('What is a relay?');

  const saved = async (button) => {
    const [download] = await Promise.all([page.waitForEvent('download'), page.getByRole('button', { name: button, exact: true }).click()]);
    return readFile(await download.path(), 'utf8');
  };
  expect(await saved('Export')).toBe('## You\n\nWhat is a relay?\n\n## sim\n\nOne.\n');
  const all = await saved('Export all');
  expect(JSON.parse(all).chats.map(({ lanes }) => lanes[0][0].text)).toEqual(['What is a baton?', 'What is a relay?']);

  await list.getByRole('button', { name: 'Delete the chat What is a baton?' }).click();
  await expect(list.locator('.title')).toHaveText([/What is a relay\?/]);
  await list.getByRole('button', { name: 'Delete all…' }).click();
  await list.getByRole('button', { name: 'Delete all 1' }).click();
  await expect(list.locator('.title')).toHaveCount(0);
  const file = (text) => ({ name: 'chats.json', mimeType: 'application/json', buffer: Buffer.from(text) });
  const broken = (change) => {
    const { chats } = JSON.parse(all);
    change(chats[0]);
    return JSON.stringify({ chats });
  };
  const wrong = ['{"chats": 3}', 'null', '{"chats": []}', broken((chat) => delete chat.lanes[0][0].files), broken((chat) => (chat.lanes[0][1].calls = [null])), broken((chat) => (chat.lanes = [])), broken((chat) => (chat.id = 'index')), broken((chat) => (chat.lanes[0][0].pictures = [{ name: 'x', url: 'https://example.org/x.png' }]))];
  for (const text of wrong) {
    await page.getByLabel('Import exported chats').setInputFiles(file(text));
    await expect(page.getByRole('alert')).toHaveText('This file has no exported chats.');
    await expect(list.locator('.title')).toHaveCount(0);
  }
  await page.getByLabel('Import exported chats').setInputFiles(file(all));
  await expect(list.locator('.title')).toHaveCount(2);
  // Whoever wants none kept has none left.
  await page.getByLabel(/Keep chats in this browser/).uncheck();
  await expect(list.locator('.title')).toHaveCount(0);
  await ask('Forget this.');
  await page.reload();
  await list.locator('summary').click();
  await expect(page.getByLabel(/Keep chats in this browser/)).not.toBeChecked();
  await expect(list.locator('.title')).toHaveCount(0);
  expect(problems).toEqual([]);
});

test('a link opens two models side by side with one prompt, and sends nothing by itself', async ({ page, problems, cluster, context }) => {
  const { url } = await cluster.serve(...SIM);
  await context.grantPermissions(['clipboard-read', 'clipboard-write']);
  const state = await (await fetch(`${url}/baton/state`)).json();
  await answerStreams(page, { ...state, history: [], models: [state.models[0], { ...state.models[0], name: 'other' }] });
  const sent = await answerChats(page, [said('First.'), DONE], [said('Second.'), DONE]);
  await page.goto(`${url}/#try?model=sim&model=other&prompt=${encodeURIComponent('Which? & why?')}`);
  await expect(message(page)).toHaveValue('Which? & why?');
  await expect(page.locator('.log')).toHaveCount(2);
  await expect(page.locator('#second-model')).toHaveValue('other');
  await page.getByRole('button', { name: /^Copy link/ }).click();
  const link = await page.evaluate(() => navigator.clipboard.readText());
  expect(link).toBe(`${url}/#try?model=sim&model=other&prompt=Which%3F+%26+why%3F`);
  expect(sent).toEqual([]);
  await message(page).press('Enter');
  await expect(page.getByRole('log', { name: 'Messages of sim' })).toContainText(/First|Second/);
  await expect(page.getByRole('log', { name: 'Messages of other' })).toContainText(/First|Second/);
  expect(sent.map(({ model, messages }) => [model, messages[0].content]).sort()).toEqual([['other', 'Which? & why?'], ['sim', 'Which? & why?']]);
  for (const width of [360, 2560]) {
    await page.setViewportSize({ width, height: 900 });
    await expectNoSidewaysScroll(page);
    await expectAccessible(page, `two models, ${width} px`);
  }
  // A link to a model that is not served says so.
  await page.goto(`${url}/#try?model=gone&prompt=x`);
  await expect(page.locator('.chat .notice')).toHaveText('gone is not served here, so sim answers.');
  expect(problems).toEqual([]);
});

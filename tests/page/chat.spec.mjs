// What a chat sends, and when a reply counts as complete.
import { expect, test } from './browser.mjs';

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

// Takes a picture of the live page once it shows a request that was handed over.
//   node scripts/quickstart/picture.mjs URL FILE.webp
import { writeFile } from 'node:fs/promises';
import { createRequire } from 'node:module';

const [url, file] = process.argv.slice(2);
// The page's tests have installed it (scripts/run-clients.sh).
const require = createRequire(new URL('../../target/page-tests/', import.meta.url));
const { chromium } = require('@playwright/test');

const executablePath = process.env.CHROMIUM ?? '/usr/bin/chromium';
const browser = await chromium.launch({ executablePath, args: ['--no-sandbox', '--disable-dev-shm-usage'] });
const page = await browser.newPage({ viewport: { width: 1440, height: 900 } });
await page.goto(url);
await page.locator('.request.done').first().waitFor({ timeout: 30_000 });
await page.waitForTimeout(3_000);
const debug = await page.context().newCDPSession(page);
const { data } = await debug.send('Page.captureScreenshot', { format: 'webp', quality: 85 });
await writeFile(file, Buffer.from(data, 'base64'));
await browser.close();

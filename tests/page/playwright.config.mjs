import { defineConfig } from '@playwright/test';

// Debian's Chromium: Playwright's own builds are not downloaded.
const executablePath = process.env.CHROMIUM ?? '/usr/bin/chromium';

export default defineConfig({
  testDir: '.',
  testMatch: process.env.PAGE_PICTURES ? 'pictures.spec.mjs' : '*.spec.mjs',
  testIgnore: process.env.PAGE_PICTURES ? [] : 'pictures.spec.mjs',
  outputDir: process.env.PAGE_RESULTS ?? 'test-results',
  reporter: [['list']],
  // Each file starts servers of its own, and the measurement of long tasks wants the machine for itself.
  workers: 1,
  timeout: 60_000,
  expect: { timeout: 15_000 },
  use: {
    launchOptions: { executablePath, args: ['--no-sandbox', '--disable-dev-shm-usage'] },
    viewport: { width: 1440, height: 1000 },
    trace: 'off',
  },
});

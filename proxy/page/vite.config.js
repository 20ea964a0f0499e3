// Builds the page into dist/, which is committed and embedded in the binary (proxy/src/http/baton/page.rs).
// File names have no hashes: the routes are fixed, and an ETag tells browsers whether a file has changed.
import { defineConfig } from 'vite';

// `npm run dev` shows the page of this folder with the data of a running endpoint.
const endpoint = process.env.BATON_URL ?? 'http://127.0.0.1:8080';
const proxy = Object.fromEntries(['/baton/state', '/baton/plan', '/v1'].map((path) => [path, endpoint]));

export default defineConfig({
  base: './',
  server: { proxy },
  build: {
    target: 'es2022',
    modulePreload: false,
    cssCodeSplit: false,
    // No `data:` URLs: the Content-Security-Policy allows them only for pictures.
    assetsInlineLimit: 0,
    reportCompressedSize: false,
    rollupOptions: {
      output: {
        entryFileNames: 'baton/page/app.js',
        assetFileNames: 'baton/page/app[extname]',
      },
    },
  },
});

// Writes the dashboards as boards.gen.ts, so that the compiler holds every key and value of them against Grafana's types,
// and puts Grafana's icons where its components look for them.
import { cpSync, readFileSync, writeFileSync } from 'node:fs';

const here = (path) => new URL(path, import.meta.url);
const names = ['run', 'fleet', 'daemon'];
const board = (name) => readFileSync(here(`../dashboards/${name}.json`), 'utf8').trim();
const text = names.map((name) => `export const ${name} = ${board(name)} as const satisfies Board;\n`);
writeFileSync(here('boards.gen.ts'), `import type { Board } from './schema';\n\n${text.join('\n')}`);
cpSync(here('node_modules/@grafana/ui/dist/public/img'), here('public/build/img'), { recursive: true });

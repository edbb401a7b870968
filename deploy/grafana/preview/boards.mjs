// Writes the dashboards as boards.gen.ts, so that the compiler holds every key and value of them against Grafana's types.
import { readFileSync, writeFileSync } from 'node:fs';

const names = ['run', 'fleet', 'daemon'];
const board = (name) => readFileSync(new URL(`../dashboards/${name}.json`, import.meta.url), 'utf8').trim();
const text = names.map((name) => `export const ${name} = ${board(name)} as const satisfies Board;\n`);
writeFileSync(new URL('boards.gen.ts', import.meta.url), `import type { Board } from './schema';\n\n${text.join('\n')}`);

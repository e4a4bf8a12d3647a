/** The pages, by address. `server/ui/__init__.py` has the form of a page. */

import { noteCharts } from "./address.mjs";
import { group } from "./group.mjs";
import { overview } from "./overview.mjs";
import { rollout } from "./rollout.mjs";
import { run } from "./run.mjs";
import { search } from "./search.mjs";

export const PAGES = [overview, run, search, group, rollout];

for (const page of PAGES) if (page.charts) noteCharts(page.path);

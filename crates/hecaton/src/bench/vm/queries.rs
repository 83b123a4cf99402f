//! Table 2 of the Hecatonchire paper: a database in the guest's memory, with different parts of
//! that memory at one donor and at two.
//!
//! A query set reads random keys. The table's figure is for a set whose keys fit into what is local
//! in every case, beside it stands a set over all keys, where most of what is asked for is remote.

use super::Bench;
use crate::bench::machine::{Machine, Memory};
use crate::bench::measure::redis_client::KEY_BYTES;
use crate::bench::measure::stats::Spread;
use crate::bench::program::guest::Request;
use crate::terminal::table::Table;
use anyhow::Context as _;
use serde::Serialize;

/// A row of the paper's table: parts of the memory that are local and at each donor, and what it
/// found.
struct Ratio {
    name: &'static str,
    local: u64,
    of: u64,
    donors: u32,
    paper_percent: f64,
}

const RATIOS: [Ratio; 4] = [
    Ratio { name: "1:2", local: 1, of: 3, donors: 1, paper_percent: 4.0 },
    Ratio { name: "1:3", local: 1, of: 4, donors: 1, paper_percent: 5.6 },
    Ratio { name: "2:1:1", local: 2, of: 4, donors: 2, paper_percent: 0.9 },
    Ratio { name: "1:1:1", local: 1, of: 3, donors: 2, paper_percent: 2.0 },
];

/// Reads of a query set.
const SET: u64 = 10_000;

/// Results of queries, as in table 2 of the paper.
#[derive(Serialize)]
pub(super) struct Queries {
    memory_bytes: u64,
    /// Size of all keys, and of the keys that are read again and again.
    data_bytes: u64,
    hot_bytes: u64,
    /// Reads of one query set.
    reads: u64,
    /// With all memory local.
    hot_s: Spread,
    sweep_s: Spread,
    rows: Vec<Row>,
}

#[derive(Serialize)]
struct Row {
    ratio: &'static str,
    donors: u32,
    local_bytes: u64,
    hot_s: Spread,
    /// More time than with all memory local, medians.
    hot_overhead_percent: f64,
    paper_percent: f64,
    sweep_s: Spread,
    sweep_overhead_percent: f64,
}

pub(super) fn run(bench: &Bench<'_>) -> anyhow::Result<Queries> {
    let memory = bench.memory;
    bench.say("queries: five guests come up");
    let mut machines = vec![bench.start("all-local", memory, Memory::Plain)?];
    for ratio in &RATIOS {
        let cluster = if ratio.donors == 1 { bench.one_donor } else { bench.two_donors };
        let local = (memory / ratio.of * ratio.local) >> 20 << 20;
        let name = format!("queries-{}", ratio.name.replace(':', "-"));
        machines.push(bench.start(&name, memory, Memory::Pool { cluster, local })?);
    }
    machines.iter_mut().try_for_each(Machine::wait_up)?;
    // The database with room to spare for the guest, and a part of it that is small beside a
    // quarter of the memory.
    let keys = machines[0].available_bytes()? / 10 * 6 / KEY_BYTES;
    let hot = memory / 24 / KEY_BYTES;
    let mib = |keys: u64| (keys * KEY_BYTES) >> 20;
    for machine in &mut machines {
        bench.say(&format!("queries: {}: {} MiB of keys are set", machine.name, mib(keys)));
        machine.perform(&Request::Keys(keys))?;
    }

    bench.say(&format!("queries: sets of {SET} reads of {} MiB of hot keys", mib(hot)));
    for machine in &mut machines {
        for _ in 0..WARM_UP {
            machine.query(0..hot, SET)?;
        }
    }
    let hot_s = in_turns(&mut machines, bench.rounds * 2, |machine| machine.query(0..hot, SET))?;
    bench.say(&format!("queries: sets of {SET} reads of all {} MiB of keys", mib(keys)));
    let sweep_s = in_turns(&mut machines, bench.rounds, |machine| machine.query(0..keys, SET))?;
    for machine in &mut machines {
        machine.perform(&Request::Compare)?;
    }

    let overhead = |these: &Spread, those: &Spread| (these.median / those.median - 1.0) * 100.0;
    let rows = RATIOS.iter().enumerate().map(|(at, ratio)| {
        let (hot, sweep) = (hot_s[at + 1], sweep_s[at + 1]);
        Row {
            ratio: ratio.name,
            donors: ratio.donors,
            local_bytes: (memory / ratio.of * ratio.local) >> 20 << 20,
            hot_s: hot,
            hot_overhead_percent: overhead(&hot, &hot_s[0]),
            paper_percent: ratio.paper_percent,
            sweep_s: sweep,
            sweep_overhead_percent: overhead(&sweep, &sweep_s[0]),
        }
    });
    Ok(Queries {
        memory_bytes: memory,
        data_bytes: keys * KEY_BYTES,
        hot_bytes: hot * KEY_BYTES,
        reads: SET,
        hot_s: hot_s[0],
        sweep_s: sweep_s[0],
        rows: rows.collect(),
    })
}

/// Query sets before the measured ones; each hot key is then asked for now and then.
const WARM_UP: usize = 4;

/// Has all machines do a thing so many times, in turns, each round beginning with another.
fn in_turns(
    machines: &mut [Machine<'_>],
    rounds: usize,
    mut measure: impl FnMut(&mut Machine<'_>) -> anyhow::Result<f64>,
) -> anyhow::Result<Vec<Spread>> {
    let count = machines.len();
    let mut seconds = vec![Vec::new(); count];
    for round in 0..rounds {
        for turn in 0..count {
            let which = (turn + round) % count;
            seconds[which].push(measure(&mut machines[which])?);
        }
    }
    seconds.iter().map(|of| Spread::of(of).context("no round")).collect()
}

pub(super) fn show(queries: &Queries) {
    let mib = |bytes: u64| bytes >> 20;
    println!(
        "Redis in a guest of {} MiB, {} MiB of keys; {} reads of {} MiB of them take {:.2} s with all \
         memory local, of all {:.2} s",
        mib(queries.memory_bytes),
        mib(queries.data_bytes),
        queries.reads,
        mib(queries.hot_bytes),
        queries.hot_s.median,
        queries.sweep_s.median
    );
    let heading = ["local:donors", "local MiB", "hot keys", "least", "most", "paper", "all keys"];
    let mut table = Table::figures(heading);
    for row in &queries.rows {
        let percent = |value: f64| format!("{value:+.1} %");
        let to_local = |seconds: f64| percent((seconds / queries.hot_s.median - 1.0) * 100.0);
        table.row([
            row.ratio.to_owned(),
            mib(row.local_bytes).to_string(),
            percent(row.hot_overhead_percent),
            to_local(row.hot_s.min),
            to_local(row.hot_s.max),
            percent(row.paper_percent),
            percent(row.sweep_overhead_percent),
        ]);
    }
    print!("{table}");
    println!(
        "  with all memory local, least and most: {:+.1} %, {:+.1} %",
        (queries.hot_s.min / queries.hot_s.median - 1.0) * 100.0,
        (queries.hot_s.max / queries.hot_s.median - 1.0) * 100.0
    );
}

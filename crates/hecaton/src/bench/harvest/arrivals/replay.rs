//! The hour with real machines, smaller and in less time: a harvest VM under a real agent, and
//! regular VMs that come and go.

use super::{
    SCALE,
    host::{HARVEST_VM, Host, Shares, named},
    model::Outcome,
    trace::{Hour, MIN_GIB, SECONDS},
};
use crate::bench::harvest::Bench;
use crate::bench::world::interrupt;
use crate::bench::world::process::{Guarded, eventually};
use anyhow::{Context as _, ensure};
use hecaton_node::agent::AgentReport;
use hecaton_vm::create::BLOCK_BYTES;
use std::{
    fs, thread,
    time::{Duration, Instant},
};

/// Between two looks at the agent's report.
const LOOK: Duration = Duration::from_millis(100);

/// How long machines that wait at the end of the hour may wait still.
const AFTER: Duration = Duration::from_secs(120);

/// The memory that the agent divided, over time, in MiB.
#[derive(Default)]
pub(super) struct Course {
    /// Since the hour began, in its own time.
    pub(super) times_s: Vec<f64>,
    /// One series for each of [`CLASSES`].
    pub(super) classes: [Vec<f64>; 4],
}

pub(super) const CLASSES: [&str; 4] = ["regular", "minimum", "harvested", "buffer and free"];

/// Replays it in so many seconds.
pub(super) fn replay(
    bench: &Bench<'_>,
    hour: &Hour,
    buffer_gib: f64,
    hour_s: f64,
) -> anyhow::Result<(Outcome, Course)> {
    let dir = bench.dir.join("arrivals");
    fs::create_dir(&dir)?;
    let outcome = replay_in(bench, hour, buffer_gib, hour_s, &dir);
    fs::remove_dir_all(&dir)?;
    outcome
}

fn replay_in(
    bench: &Bench<'_>,
    hour: &Hour,
    buffer_gib: f64,
    hour_s: f64,
    dir: &std::path::Path,
) -> anyhow::Result<(Outcome, Course)> {
    let managed = scaled(hour.left_gib());
    let batch = bench.sizes.batch;
    let mut host = Host::start(Shares { managed, buffer: scaled(buffer_gib), batch }, dir)?;
    // First: no harvest VM is created at the expense of the buffer.
    let harvest = host.harvest(bench.kit, (scaled(MIN_GIB), managed), dir)?;
    let mut machines: Vec<Option<Guarded>> = hour.machines.iter().map(|_| None).collect();
    for (at, machine) in hour.machines.iter().enumerate() {
        if machine.arrives_s.is_none() {
            machines[at] = Some(host.regular(bench.kit, &name(at), scaled(machine.gib))?);
            eventually(AFTER, || {
                named(&host.report()?, &name(at)).context("it is not admitted").map(drop)
            })?;
        }
    }
    host.settle()?;
    let mut replayed = Replayed::new(hour, hour_s);
    let begun = Instant::now();
    loop {
        let second = begun.elapsed().as_secs_f64() * SECONDS / hour_s;
        for (at, machine) in hour.machines.iter().enumerate() {
            let is_due = machine.arrives_s.is_some_and(|arrives| second >= arrives);
            if is_due && !replayed.has_come[at] {
                replayed.has_come[at] = true;
                machines[at] = Some(host.regular(bench.kit, &name(at), scaled(machine.gib))?);
            }
            let is_over = machine.leaves_s.is_some_and(|leaves| second >= leaves);
            let is_admitted = machine.arrives_s.is_none() || replayed.waited_s[at].is_some();
            if is_over && is_admitted && second < SECONDS {
                machines[at] = None;
            }
        }
        let is_whole = replayed.look(&host.report()?, second).map_err(|error| {
            error.context(format!("the harvest VM's last words: {}", harvest.last_words()))
        })?;
        if second >= SECONDS && is_whole {
            break;
        }
        ensure!(begun.elapsed().as_secs_f64() < hour_s + AFTER.as_secs_f64(), "some wait still");
        interrupt::check()?;
        thread::sleep(LOOK);
    }
    // Before the node: machines first.
    drop((machines, harvest));
    Ok(replayed.end())
}

fn name(at: usize) -> String {
    format!("regular-{at}")
}

/// A size of the hour's, in whole blocks.
fn scaled(gib: f64) -> u64 {
    ((gib * f64::from(1 << 30) / SCALE) as u64).next_multiple_of(BLOCK_BYTES)
}

/// Observations of one replay.
struct Replayed {
    has_come: Vec<bool>,
    is_there_from_the_start: Vec<bool>,
    /// By the agent's own reckoning; none for one that was not admitted yet.
    waited_s: Vec<Option<f64>>,
    course: Course,
    hour_s: f64,
}

impl Replayed {
    fn new(hour: &Hour, hour_s: f64) -> Self {
        let is_there = |machine: &super::trace::Regular| machine.arrives_s.is_none();
        let is_there: Vec<bool> = hour.machines.iter().map(is_there).collect();
        Self {
            has_come: is_there.clone(),
            waited_s: vec![None; is_there.len()],
            is_there_from_the_start: is_there,
            course: Course::default(),
            hour_s,
        }
    }

    /// Takes a report; whether all that have come are admitted.
    fn look(&mut self, report: &AgentReport, second: f64) -> anyhow::Result<bool> {
        named(report, HARVEST_VM).context("the harvest VM is gone")?;
        for (at, waited) in self.waited_s.iter_mut().enumerate() {
            if let Some(machine) = named(report, &name(at)) {
                *waited = machine.waited_ms.map(|ms| ms as f64 / 1e3);
            }
        }
        let mib = |of: fn(&hecaton_broker::NodeLedger) -> u64| {
            report.nodes.iter().map(|node| of(&node.ledger)).sum::<u64>() as f64
                / f64::from(1 << 20)
        };
        let classes = [
            mib(|ledger| ledger.regular_bytes),
            mib(|ledger| ledger.minimum_bytes),
            mib(|ledger| ledger.harvested_bytes),
            mib(|ledger| ledger.buffer_bytes + ledger.unassigned_bytes + ledger.reserved_bytes),
        ];
        self.course.times_s.push(second * self.hour_s / SECONDS);
        for (values, value) in self.course.classes.iter_mut().zip(classes) {
            values.push(value);
        }
        let mut came = self.has_come.iter().zip(&self.waited_s).zip(&self.is_there_from_the_start);
        Ok(came.all(|((has_come, waited), is_there)| !has_come || *is_there || waited.is_some()))
    }

    fn end(self) -> (Outcome, Course) {
        let came = self.waited_s.iter().zip(&self.is_there_from_the_start);
        let delays_s = came.filter(|(_, is_there)| !**is_there).filter_map(|(waited, _)| *waited);
        let harvested = &self.course.classes[2];
        let mean_mib = harvested.iter().sum::<f64>() / harvested.len().max(1) as f64;
        let harvested_gib = mean_mib / 1024.0 * SCALE;
        (Outcome { delays_s: delays_s.collect(), harvested_gib }, self.course)
    }
}

//! Measures a manager's work for one second of heartbeats, without the network.
//! The manager reads them, applies them to its registry, policy included, and writes the answers.
//! In the counted seconds no node joins, leaves or falls silent.

use crate::bench::control::reporter::Reporter;
use anyhow::Context as _;
use hecaton_manager::Registry;
use hecaton_manager::registry::{MAX_NODES, SILENT_AFTER};
use hecaton_manager::watching::watch::Watch;
use hecaton_node::cluster::report::{HeartbeatAnswer, NodeReport};
use hecaton_policy::cluster::choice::Choice;
use rustix::time::{ClockId, clock_gettime};
use serde::Serialize;
use std::time::Duration;

/// Medians of the seconds, in processor time, which excludes other load on the machine.
#[derive(Serialize)]
pub(super) struct Figures {
    pub(super) nodes: u32,
    pub(super) consumers: u64,
    /// Bytes of all heartbeats of a second, and of all answers.
    pub(super) heard_bytes: usize,
    pub(super) said_bytes: usize,
    pub(super) read_s: f64,
    pub(super) registry_s: f64,
    pub(super) write_s: f64,
    /// Builds and encodes the overview that people see.
    pub(super) look_s: f64,
    /// All nodes join at once: seconds until they know each other, processor time in total and in
    /// the worst of these seconds, and bytes of the answers.
    pub(super) form_seconds: usize,
    pub(super) form_s: f64,
    pub(super) form_most_s: f64,
    pub(super) form_said_bytes: usize,
    /// Resident memory of the registry, and of the history that [`Watch`] keeps for people.
    pub(super) state_bytes: u64,
}

/// Traffic of one second, and the processor time that it takes.
#[derive(Default)]
struct Second {
    heard_bytes: usize,
    said_bytes: usize,
    /// Donors and orders in the answers.
    news: usize,
    read: Duration,
    registry: Duration,
    write: Duration,
    look: Duration,
}

impl Second {
    fn all(&self) -> Duration {
        self.read + self.registry + self.write + self.look
    }
}

/// Measures `nodes` nodes, at most [`MAX_NODES`], with `consumers` consumers each.
pub(super) fn measure(nodes: u32, consumers: u32, rounds: u32) -> anyhow::Result<Figures> {
    let nodes = nodes.min(MAX_NODES as u32);
    let mut cluster: Vec<Reporter> =
        (0..nodes).map(|at| Reporter::new(at, nodes, consumers)).collect();
    let before = super::resident_bytes()?;
    let mut registry = Registry::default();
    registry.choose(Some(Choice::Anticipating {}));
    let mut watch = Watch::default();
    let mut now = SILENT_AFTER;
    let mut pass = || -> anyhow::Result<Second> {
        now += Duration::from_secs(1);
        let mut second = Second::default();
        for node in &mut cluster {
            beat(node, &mut registry, now, &mut second)?;
        }
        registry.written();
        let began = processor_time();
        drop(serde_json::to_vec(&watch.look(registry.status(now)))?);
        second.look = processor_time() - began;
        Ok(second)
    };
    let mut formed = Vec::new();
    // Until no answer contains a donor or an order.
    while formed.last().is_none_or(|second: &Second| second.news > 0) {
        formed.push(pass()?);
    }
    let counted = (0..rounds).map(|_| pass()).collect::<anyhow::Result<Vec<Second>>>()?;
    let state_bytes = super::resident_bytes()?.saturating_sub(before);
    let processor_s = |second: &Second| second.all().as_secs_f64();
    let median =
        |time: fn(&Second) -> Duration| super::median_s(counted.iter().map(time).collect());
    let last = counted.last().context("no second was measured")?;
    Ok(Figures {
        nodes,
        consumers: u64::from(nodes) * u64::from(consumers),
        heard_bytes: last.heard_bytes,
        said_bytes: last.said_bytes,
        read_s: median(|second| second.read),
        registry_s: median(|second| second.registry),
        write_s: median(|second| second.write),
        look_s: median(|second| second.look),
        form_seconds: formed.len(),
        form_s: formed.iter().map(processor_s).sum(),
        form_most_s: formed.iter().map(processor_s).fold(0.0, f64::max),
        form_said_bytes: formed.iter().map(|second| second.said_bytes).sum(),
        state_bytes,
    })
}

/// Passes one heartbeat through the manager and adds its cost to `second`.
fn beat(
    node: &mut Reporter,
    registry: &mut Registry,
    now: Duration,
    second: &mut Second,
) -> anyhow::Result<HeartbeatAnswer> {
    let (name, said) = {
        let says = node.says();
        (says.name.clone(), serde_json::to_vec(&says)?)
    };
    let began = processor_time();
    let heard: NodeReport = serde_json::from_slice(&said)?;
    let read = processor_time();
    let answer = registry.heartbeat(now, &name, heard)?;
    let taken = processor_time();
    let told = serde_json::to_vec(&answer)?;
    second.write += processor_time() - taken;
    second.registry += taken - read;
    second.read += read - began;
    second.heard_bytes += said.len();
    second.said_bytes += told.len();
    second.news += answer.list.donors.len() + answer.orders.orders.len();
    node.hear(&answer);
    Ok(answer)
}

/// Processor time of this thread so far.
fn processor_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_that_know_each_other_are_told_of_nobody_anew() {
        let mut registry = Registry::default();
        let mut cluster: Vec<Reporter> = (0..8).map(|at| Reporter::new(at, 8, 3)).collect();
        let mut told = [0; 4];
        for (now, told) in (1..).map(Duration::from_secs).zip(&mut told) {
            for node in &mut cluster {
                let answer = beat(node, &mut registry, now, &mut Second::default()).unwrap();
                *told += answer.list.donors.len();
                assert!(answer.orders.orders.is_empty(), "nothing is to be done");
            }
        }
        // A node learns of itself and earlier nodes at once, of later ones with its next heartbeat.
        assert_eq!(told, [36, 28, 0, 0]);
    }
}

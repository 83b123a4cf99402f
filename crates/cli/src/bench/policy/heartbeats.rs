//! What a manager does for the heartbeats of a cluster in a second, without the network: reads them, takes them into
//! its registry, policy included, and writes the answers.
//!
//! The nodes say that they have acted upon what they were told, as real ones do, and remember nothing else of it: what
//! thousands of them know of each other is not the manager's memory. None comes, goes or falls silent.

use anyhow::Context as _;
use hecaton_donor::{Snapshot, SpaceSnapshot};
use hecaton_manager::Registry;
use hecaton_manager::registry::{MAX_NODES, SILENT_AFTER};
use hecaton_memory::{Epoch, SpaceId, pages_to_bytes};
use hecaton_node::donors::{DonorReport, DonorState};
use hecaton_node::pagers::{ConsumerReport, PagerState};
use hecaton_node::report::{HeartbeatAnswer, MemberReport, NodeReport, PoolShare};
use hecaton_pager::{DonorUse, PoolUse, Stats};
use hecaton_policy::cluster::choice::Choice;
use serde::Serialize;
use std::time::{Duration, Instant};

/// Medians of the seconds, on one processor.
#[derive(Serialize)]
pub(super) struct Figures {
    pub(super) nodes: u32,
    pub(super) consumers: u64,
    /// All heartbeats of a second, and all answers.
    pub(super) heard_bytes: usize,
    pub(super) said_bytes: usize,
    pub(super) read_s: f64,
    pub(super) registry_s: f64,
    pub(super) write_s: f64,
    /// Resident memory that the registry took.
    pub(super) registry_bytes: u64,
}

/// What passes in a second, and how long it takes.
#[derive(Default)]
struct Second {
    heard_bytes: usize,
    said_bytes: usize,
    read: Duration,
    registry: Duration,
    write: Duration,
}

/// Of so many nodes, or as many as a manager takes, with so many consumers each.
pub(super) fn measure(nodes: u32, consumers: u32, rounds: u32) -> anyhow::Result<Figures> {
    let nodes = nodes.min(MAX_NODES as u32);
    let mut cluster: Vec<Node> = (0..nodes).map(|at| Node::new(at, nodes, consumers)).collect();
    let before = super::resident_bytes()?;
    let mut registry = Registry::default();
    registry.choose(Some(Choice::Anticipating {}));
    let mut now = SILENT_AFTER;
    let mut seconds = Vec::new();
    // They are told of each other in the first two.
    for _ in 0..rounds + 2 {
        now += Duration::from_secs(1);
        let mut second = Second::default();
        for node in &mut cluster {
            node.beat(&mut registry, now, &mut second)?;
        }
        registry.written();
        seconds.push(second);
    }
    let registry_bytes = super::resident_bytes()?.saturating_sub(before);
    let counted = &seconds[2..];
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
        registry_bytes,
    })
}

/// As a node says itself.
struct Node {
    report: NodeReport,
    /// Of how many consumers the manager is told one by one.
    most_told: Option<u32>,
}

impl Node {
    fn new(at: u32, of: u32, consumers: u32) -> Node {
        let name = name(at);
        let pages = super::HOME_PAGES;
        // Half of its own consumers' pages, and half of those of the node before it.
        let spaces = [at, (at + of - 1) % of]
            .into_iter()
            .flat_map(|home| (0..consumers).map(move |number| space(home, number)));
        let spaces = spaces.collect();
        let stats = Snapshot { pages, limit_pages: pages, spaces, ..Snapshot::default() };
        let donor = DonorReport {
            name: name.clone(),
            state: DonorState::Serving,
            address: Some(([10, 0, (at >> 8) as u8, at as u8], 7071).into()),
            pid: Some(at),
            lend_bytes: pages_to_bytes(pages),
            stats: Some(stats),
            ..DonorReport::default()
        };
        let neighbour = self::name((at + 1) % of);
        let report = NodeReport {
            boot: u64::from(at) + 1,
            location: Some(format!("rack{}/chassis{}", at / 40, at / 10)),
            donors: vec![donor],
            consumers: (0..consumers).map(|number| consumer(at, number, &neighbour)).collect(),
            name: name.clone(),
            member: MemberReport { life: u64::from(at) + 1, ..MemberReport::default() },
            ..NodeReport::default()
        };
        // A node that has just started has none.
        Node { report, most_told: Some(0) }
    }

    fn beat(
        &mut self,
        registry: &mut Registry,
        now: Duration,
        second: &mut Second,
    ) -> anyhow::Result<HeartbeatAnswer> {
        let said = match self.most_told {
            None => serde_json::to_vec(&self.report)?,
            Some(most) => serde_json::to_vec(&self.report.clone().in_brief(most as usize))?,
        };
        let began = Instant::now();
        let heard: NodeReport = serde_json::from_slice(&said)?;
        let read = Instant::now();
        let answer = registry.heartbeat(now, &self.report.name, heard)?;
        let taken = Instant::now();
        let told = serde_json::to_vec(&answer)?;
        second.write += taken.elapsed();
        second.registry += taken - read;
        second.read += read - began;
        second.heard_bytes += said.len();
        second.said_bytes += told.len();
        self.most_told = answer.most_told;
        self.report.donors_version = answer.list.version;
        let orders = answer.orders.orders.len() as u64;
        let (member, heard) = (&mut self.report.member, answer.orders.first + orders);
        (member.session, member.heard) = (answer.orders.session, heard);
        member.messages_handled += orders;
        let policy = Some(Choice::Anticipating {});
        let (used_pages, wanted_pages) = (super::HOME_PAGES / 2, super::HOME_PAGES);
        let quota_pages = answer.quota_pages;
        let pool = PoolShare { policy, quota_pages, used_pages, wanted_pages, ..self.report.pool };
        self.report.pool = pool;
        Ok(answer)
    }
}

/// What a donor says of a consumer's pages.
fn space(at: u32, number: u32) -> SpaceSnapshot {
    SpaceSnapshot {
        space: space_id(at, number),
        consumer: format!("program-{number}"),
        fence: Epoch(1),
        extents: 1,
        pages: super::HOME_PAGES / 400,
        recalled: 0,
        silent_ms: 100,
        lease_ms: 60_000,
    }
}

fn space_id(at: u32, number: u32) -> SpaceId {
    SpaceId(u64::from(at) << 32 | u64::from(number))
}

fn name(at: u32) -> String {
    format!("node-{at}")
}

/// One that has half of its pages at its own node, and half at another one.
fn consumer(at: u32, number: u32, neighbour: &str) -> ConsumerReport {
    let pool_bytes = pages_to_bytes(super::HOME_PAGES / 200);
    let held = |name: &str| DonorUse {
        name: name.to_owned(),
        bytes: pool_bytes / 2,
        reachable: true,
        ..DonorUse::default()
    };
    let donors = vec![held(&name(at)), held(neighbour)];
    let stats = Stats {
        pool_bytes,
        puts_total: u64::from(number) << 20,
        puts_succeeded: u64::from(number) << 20,
        pool: PoolUse { copies: 1, donors, ..PoolUse::default() },
        ..Stats::default()
    };
    ConsumerReport {
        name: format!("program-{number}"),
        space: space_id(at, number),
        state: PagerState::Serving,
        pid: Some(number),
        local_bytes: pool_bytes,
        stats: Some(stats),
        ..ConsumerReport::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_that_know_each_other_are_told_of_nobody_anew() {
        let mut registry = Registry::default();
        let mut cluster: Vec<Node> = (0..8).map(|at| Node::new(at, 8, 3)).collect();
        let (mut told, mut heard) = ([0; 4], 0);
        for (now, told) in (1..).map(Duration::from_secs).zip(&mut told) {
            for node in &mut cluster {
                let answer = node.beat(&mut registry, now, &mut Second::default()).unwrap();
                *told += answer.orders.orders.len();
                heard = answer.orders.first;
            }
        }
        assert!(told[0] > 0 && told[2..] == [0, 0], "{told:?}");
        assert_eq!(heard, 8, "of all, itself among them");
    }
}

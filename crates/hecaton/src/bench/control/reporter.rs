//! Simulates nodes of a large cluster: builds the report that each sends every second to the
//! measured manager.
//!
//! Simulated nodes confirm every order, as real ones do, and remember nothing else of it. The
//! mutual knowledge of thousands of nodes is not the manager's memory.

use hecaton_donor::{Snapshot, SpaceSnapshot};
use hecaton_memory::{Epoch, SpaceId, pages_to_bytes};
use hecaton_node::cluster::report::{HeartbeatAnswer, Host, MemberReport, NodeReport, PoolShare};
use hecaton_node::donors::{DonorReport, DonorState};
use hecaton_node::pagers::{ConsumerReport, PagerState};
use hecaton_pager::{DonorUse, PoolUse, Stats};
use hecaton_policy::cluster::choice::Choice;
use std::borrow::Cow;

/// Pages of each node's own memory: 64 GiB.
pub(crate) const HOME_PAGES: u64 = 16 << 20;

/// A node, as it says itself.
pub(crate) struct Reporter {
    report: NodeReport,
    /// Number of consumers that a report lists one by one; `None`: all of them.
    most_told: Option<u32>,
}

impl Reporter {
    /// The node `at` of so many, with so many consumers, which have half of their memory at the
    /// next one.
    pub(crate) fn new(at: u32, of: u32, consumers: u32) -> Reporter {
        let name = name(at);
        let pages = HOME_PAGES;
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
        let neighbour = crate::bench::control::reporter::name((at + 1) % of);
        let report = NodeReport {
            boot: u64::from(at) + 1,
            host: Host {
                boot_id: format!("host-{at}"),
                memory_bytes: 2 * pages_to_bytes(pages),
                available_bytes: pages_to_bytes(pages),
            },
            location: Some(format!("rack{}/chassis{}", at / 40, at / 10)),
            donors: vec![donor],
            consumers: (0..consumers).map(|number| consumer(at, number, &neighbour)).collect(),
            name: name.clone(),
            member: MemberReport { life: u64::from(at) + 1, ..MemberReport::default() },
            ..NodeReport::default()
        };
        // A node that has just started has none.
        Reporter { report, most_told: Some(0) }
    }

    /// Returns the report that the node sends now.
    pub(crate) fn says(&self) -> Cow<'_, NodeReport> {
        match self.most_told {
            None => Cow::Borrowed(&self.report),
            Some(most) => Cow::Owned(self.report.clone().in_brief(most as usize)),
        }
    }

    /// Does what it is told.
    pub(crate) fn hear(&mut self, answer: &HeartbeatAnswer) {
        self.most_told = answer.most_told;
        self.report.donors_version = answer.list.version;
        let orders = answer.orders.orders.len() as u64;
        let (member, heard) = (&mut self.report.member, answer.orders.first + orders);
        (member.session, member.heard) = (answer.orders.session, heard);
        member.messages_handled += orders;
        let policy = Some(Choice::Anticipating {});
        let (used_pages, wanted_pages) = (HOME_PAGES / 2, HOME_PAGES);
        let quota_pages = answer.quota_pages;
        let pool = PoolShare { policy, quota_pages, used_pages, wanted_pages, ..self.report.pool };
        self.report.pool = pool;
    }
}

/// Builds a donor's snapshot of one consumer's pages.
fn space(at: u32, number: u32) -> SpaceSnapshot {
    SpaceSnapshot {
        space: space_id(at, number),
        consumer: format!("program-{number}"),
        fence: Epoch(1),
        extents: 1,
        pages: HOME_PAGES / 400,
        recalled: 0,
        silent_ms: 100,
        lease_ms: 60_000,
    }
}

fn space_id(at: u32, number: u32) -> SpaceId {
    SpaceId(u64::from(at) << 32 | u64::from(number))
}

/// Its name.
pub(crate) fn name(at: u32) -> String {
    format!("node-{at}")
}

/// One that has half of its pages at its own node, and half at another one.
fn consumer(at: u32, number: u32, neighbour: &str) -> ConsumerReport {
    let pool_bytes = pages_to_bytes(HOME_PAGES / 200);
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

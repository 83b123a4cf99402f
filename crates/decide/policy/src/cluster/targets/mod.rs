//! The first level: how a node divides the pages that it owns among its consumers, once a second.
//!
//! | policy | targets | asks for more |
//! |---|---|---|
//! | [`Policy::GreedyLocal`] | none: who comes first | never |
//! | [`Policy::GreedyRemote`] | none | a fixed number of pages when a put failed |
//! | [`Policy::Tlp`] | [`tlp`], the paper's algorithm 2 | by as much as the targets overran |
//! | [`Policy::Anticipating`] | [`anticipating`], our own | by `wanted_pages` in its statistics |
//!
//! All but the greedy ones keep the sum of the targets within what the node owns.

pub mod anticipating;
pub mod share;
pub mod tlp;

use super::account::ConsumerStatistics;
use serde::Serialize;

/// Pages that greedy-remote asks for at a time (the paper's III-D).
pub const GREEDY_REQUEST_PAGES: u64 = 1000;

/// How targets are found, with the settings of each way.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "kebab-case", tag = "policy")]
pub enum Policy {
    /// Each node for itself, first come, first served.
    GreedyLocal,
    /// First come, first served, and more from other nodes.
    GreedyRemote {
        /// Pages to ask for in a period with failed puts.
        request_pages: u64,
    },
    /// The paper's two-level policy.
    Tlp(tlp::Settings),
    /// Ours.
    Anticipating(anticipating::Settings),
}

/// Input of a node's decision.
#[derive(Clone, Copy, Debug)]
pub struct Situation<'a> {
    /// Pages that its consumers may use (`total_alloc_pages`).
    pub total_pages: u64,
    /// Pages of the total that the manager has asked for and that are in use.
    pub owed_pages: u64,
    /// The period that has just ended.
    pub consumers: &'a [ConsumerStatistics],
}

/// Outcome of a node's decision.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Decision {
    /// The target of each consumer, in their order; `None`: only free memory limits it.
    pub targets: Vec<Option<u64>>,
    /// Pages that each consumer must spill: it has not touched them for long, and others are in
    /// want of them.
    pub take_back: Vec<u64>,
    /// Pages to ask the manager for (*Grant-Any*); 0: none.
    pub request_pages: u64,
    /// Pages that its consumers could use at present. Unused ones beyond that can go to other
    /// nodes.
    pub wanted_pages: u64,
}

/// The first level of one node, with what it remembers.
#[derive(Clone, Debug)]
pub struct FirstLevel {
    policy: Policy,
    anticipating: anticipating::Memory,
}

impl FirstLevel {
    /// The first level of a node that knows nothing yet.
    pub fn new(policy: Policy) -> FirstLevel {
        FirstLevel { policy, anticipating: anticipating::Memory::default() }
    }

    /// Decides at the end of a period. `decision` is overwritten: its vectors are used again.
    pub fn decide(&mut self, situation: &Situation<'_>, decision: &mut Decision) {
        decision.targets.clear();
        decision.take_back.clear();
        decision.take_back.resize(situation.consumers.len(), 0);
        match self.policy {
            Policy::GreedyLocal => greedy(situation, 0, decision),
            Policy::GreedyRemote { request_pages } => greedy(situation, request_pages, decision),
            Policy::Tlp(settings) => tlp::decide(&settings, situation, decision),
            Policy::Anticipating(settings) => {
                self.anticipating.decide(&settings, situation, decision);
            }
        }
    }
}

fn greedy(situation: &Situation<'_>, request_pages: u64, decision: &mut Decision) {
    decision.targets.resize(situation.consumers.len(), None);
    let under_pressure = situation.consumers.iter().any(|consumer| consumer.puts_failed() > 0);
    decision.request_pages = if under_pressure { request_pages } else { 0 };
    decision.wanted_pages = situation.consumers.iter().map(|consumer| consumer.used_pages).sum();
}

/// Present target. A consumer without one starts from an equal portion (the paper's III-D).
fn present_target(situation: &Situation<'_>, consumer: &ConsumerStatistics) -> u64 {
    let portion = situation.total_pages / (situation.consumers.len() as u64).max(1);
    consumer.target_pages.unwrap_or(portion)
}

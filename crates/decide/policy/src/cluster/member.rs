//! Tracks one node's membership, and the pages that it owns.
//!
//! A *mechanism* stands beside it: it knows which pages consumers use, tells it how many
//! ([`Member::set_used`]), and makes room when more are used than owned ([`Member::excess_pages`]).
//!
//! Three rules keep each page with one owner at most, whatever is in flight:
//!
//! - A block is accepted only if its home is enabled *in that very incarnation*, and goes home
//!   otherwise.
//! - A home takes back only pages of its present incarnation. In each one it owns all of its memory
//!   anew.
//! - A node that has acted upon Force-Return or Invalidate cannot come to own pages of that
//!   incarnation again.
//!
//! The test that explores all orders of messages in small clusters is in
//! `tests/behaviour/membership.rs`.

use super::message::{Block, Holdings, Outgoing, ToManager, ToNode};
use super::{Home, NodeId};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Where a node believes to stand. The manager's [`super::membership::NodeState`] is ahead of it by
/// what is under way.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// Has said Invalidate, and waits to be let in.
    Recovering,
    /// Takes part.
    #[default]
    Active,
    /// Has asked to leave.
    Leaving,
    /// Has left. It may register again, in another life.
    Inactive,
}

/// A node's membership.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Member {
    id: NodeId,
    life: u64,
    home_pages: u64,
    phase: Phase,
    /// Leaving, it has asked to stay, and has no answer yet.
    wants_to_stay: bool,
    /// The paper's bitmap of enabled nodes, each with the life it is enabled in.
    enabled: BTreeMap<NodeId, u64>,
    /// Owned pages of each home; no entry is zero.
    owned: BTreeMap<Home, u64>,
    used_pages: u64,
    /// Pages that were asked for in this period and could not be given, because they are in use.
    owed_pages: u64,
    wanted_pages: u64,
    messages_handled: u64,
}

impl Member {
    /// A node that starts after a clean end, or for the first time: it registers.
    pub fn start(id: NodeId, life: u64, home_pages: u64) -> (Member, Vec<Outgoing>) {
        let mut member = Member::new(id, life, home_pages, Phase::Inactive);
        let out = member.register(life);
        (member, out)
    }

    /// A node that starts after a life without a clean end: it has that life forgotten first.
    /// `life` is the one it will register with.
    pub fn start_after_crash(id: NodeId, life: u64, home_pages: u64) -> (Member, Vec<Outgoing>) {
        let member = Member::new(id, life, home_pages, Phase::Recovering);
        (member, vec![Outgoing::Manager(ToManager::Invalidate)])
    }

    fn new(id: NodeId, life: u64, home_pages: u64, phase: Phase) -> Member {
        Member {
            id,
            life,
            home_pages,
            phase,
            wants_to_stay: false,
            enabled: BTreeMap::new(),
            owned: BTreeMap::new(),
            used_pages: 0,
            owed_pages: 0,
            wanted_pages: 0,
            messages_handled: 0,
        }
    }

    /// Joins, or joins again after it has left. `life` is one that this node never registered with.
    /// Does nothing in another phase than Inactive.
    pub fn register(&mut self, life: u64) -> Vec<Outgoing> {
        if self.phase != Phase::Inactive {
            return Vec::new();
        }
        self.life = life;
        self.phase = Phase::Active;
        self.messages_handled = 0;
        self.enabled = BTreeMap::new();
        self.owned = BTreeMap::new();
        let home = Home { node: self.id, life };
        self.gain(Block { home, pages: self.home_pages });
        vec![Outgoing::Manager(ToManager::Register { life })]
    }

    /// Begins to leave. The mechanism is to free all pages in use.
    pub fn leave(&mut self) -> Vec<Outgoing> {
        if self.phase != Phase::Active {
            return Vec::new();
        }
        self.phase = Phase::Leaving;
        let mut out = vec![Outgoing::Manager(ToManager::LeaveReq)];
        out.extend(self.settle());
        out
    }

    /// Thinks better of leaving. It goes on to leave until the manager lets it stay; if it has left
    /// by then, it may register.
    pub fn stay(&mut self) -> Vec<Outgoing> {
        if self.phase != Phase::Leaving || self.wants_to_stay {
            return Vec::new();
        }
        self.wants_to_stay = true;
        vec![Outgoing::Manager(ToManager::Stay)]
    }

    /// Starts anew with a manager that has lost what it knew, or has not heard of this node for a
    /// while.
    pub fn reconnected(&mut self) -> Vec<Outgoing> {
        self.messages_handled = 0;
        let holdings = ToManager::Statistics(self.holdings());
        let messages = match self.phase {
            Phase::Recovering => vec![ToManager::Invalidate],
            Phase::Active => vec![holdings],
            Phase::Leaving if self.wants_to_stay => vec![holdings, ToManager::Stay],
            // The manager may not know the node any more, and lets go only whom it knows.
            Phase::Leaving => vec![holdings, ToManager::LeaveReq],
            Phase::Inactive => Vec::new(),
        };
        messages.into_iter().map(Outgoing::Manager).collect()
    }

    /// Acts upon a message of the manager.
    pub fn handle(&mut self, message: &ToNode) -> Vec<Outgoing> {
        self.messages_handled += u64::from(message.is_counted());
        match *message {
            ToNode::EnableNode(home) => {
                self.enabled.insert(home.node, home.life);
                Vec::new()
            }
            ToNode::GrantFwd { pages, to } => self.grant(pages, to),
            ToNode::ForceReturn(node) => {
                self.enabled.remove(&node);
                self.settle()
            }
            ToNode::LeaveNotify => {
                if self.phase == Phase::Leaving {
                    self.phase = Phase::Inactive;
                    self.wants_to_stay = false;
                }
                Vec::new()
            }
            ToNode::StayNotify => {
                if std::mem::take(&mut self.wants_to_stay) && self.phase == Phase::Leaving {
                    self.phase = Phase::Active;
                }
                Vec::new()
            }
            ToNode::Invalidate(node) if node == self.id => self.start_anew(),
            ToNode::Invalidate(node) => {
                self.enabled.remove(&node);
                self.owned.retain(|home, _| home.node != node);
                Vec::new()
            }
            ToNode::InvalidateNotify => {
                if self.phase == Phase::Recovering {
                    self.phase = Phase::Inactive;
                    return self.register(self.life);
                }
                Vec::new()
            }
        }
    }

    /// Takes over what another node granted; what may not be taken goes home.
    pub fn receive(&mut self, blocks: &[Block]) -> Vec<Outgoing> {
        let mut refused: BTreeMap<NodeId, Vec<Block>> = BTreeMap::new();
        for &block in blocks {
            if block.home.node == self.id {
                // Pages of an earlier life are this life's already.
                if block.home.life == self.life && self.phase != Phase::Recovering {
                    self.gain(block);
                }
            } else if self.phase == Phase::Active && self.is_enabled(block.home) {
                self.gain(block);
            } else {
                refused.entry(block.home.node).or_default().push(block);
            }
        }
        let mut out: Vec<Outgoing> =
            refused.into_iter().map(|(to, blocks)| Outgoing::Grant { to, blocks }).collect();
        // Consumers' data may lie in these pages now, so that other pages can go home.
        out.extend(self.settle());
        out
    }

    /// Tells how many pages consumers use, and sends home what that sets free.
    pub fn set_used(&mut self, pages: u64) -> Vec<Outgoing> {
        self.used_pages = pages;
        self.settle()
    }

    /// The statistics of the period that ends here, in which consumers could have used
    /// `wanted_pages`.
    pub fn end_period(&mut self, wanted_pages: u64) -> Holdings {
        self.owed_pages = 0;
        self.wanted_pages = wanted_pages;
        self.holdings()
    }

    /// Statistics of this node: the pages that it owns, and its counts.
    pub fn holdings(&self) -> Holdings {
        let owned = self.owned.iter().map(|(&home, &pages)| Block { home, pages }).collect();
        Holdings {
            life: self.life,
            messages_handled: self.messages_handled,
            home_pages: self.home_pages,
            free_pages: self.free_pages(),
            wanted_pages: self.wanted_pages,
            owned,
        }
    }

    /// Where it believes to stand.
    pub fn phase(&self) -> Phase {
        self.phase
    }

    /// Leaving, it has asked to stay.
    pub fn wants_to_stay(&self) -> bool {
        self.wants_to_stay
    }

    /// Its present life.
    pub fn life(&self) -> u64 {
        self.life
    }

    /// Pages that its consumers may use: all that it owns, but for those that are on their way
    /// home. None when it takes no part.
    pub fn usable_pages(&self) -> u64 {
        let may_use = |home: &Home| match self.phase {
            Phase::Active => home.node == self.id || self.is_enabled(*home),
            Phase::Leaving | Phase::Recovering | Phase::Inactive => false,
        };
        self.owned.iter().filter(|(home, _)| may_use(home)).map(|(_, pages)| pages).sum()
    }

    /// Usable pages that nobody uses.
    pub fn free_pages(&self) -> u64 {
        self.usable_pages().saturating_sub(self.used_pages)
    }

    /// Pages in use beyond what may be used: the mechanism is to move their contents elsewhere.
    pub fn excess_pages(&self) -> u64 {
        self.used_pages.saturating_sub(self.usable_pages())
    }

    /// Pages that the manager asked for in this period and that are in use. A policy that divides
    /// so much less among the consumers gets them free.
    pub fn owed_pages(&self) -> u64 {
        self.owed_pages
    }

    /// Owned pages of its own memory.
    pub fn own_pages(&self) -> u64 {
        self.owned.get(&Home { node: self.id, life: self.life }).copied().unwrap_or(0)
    }

    fn is_enabled(&self, home: Home) -> bool {
        self.enabled.get(&home.node) == Some(&home.life)
    }

    /// Gives free pages to another node: first those that thereby come home, then its own, then
    /// others'. (The paper prefers blocks close to the target.)
    fn grant(&mut self, pages: u64, to: NodeId) -> Vec<Outgoing> {
        if self.phase != Phase::Active || to == self.id {
            return Vec::new();
        }
        let mut left = pages.min(self.free_pages());
        self.owed_pages += pages - left;
        let mut homes: Vec<Home> = self.owned.keys().copied().collect();
        homes.retain(|home| home.node == self.id || self.is_enabled(*home));
        homes.sort_by_key(|home| (home.node != to, home.node != self.id, *home));
        let mut blocks = Vec::new();
        for home in homes {
            let pages = self.lose(home, left);
            left -= pages;
            if pages > 0 {
                blocks.push(Block { home, pages });
            }
        }
        if blocks.is_empty() { Vec::new() } else { vec![Outgoing::Grant { to, blocks }] }
    }

    /// Sends home what may not be used here, as far as it is free.
    fn settle(&mut self) -> Vec<Outgoing> {
        let mut free = self.owned.values().sum::<u64>().saturating_sub(self.used_pages);
        let homes: Vec<Home> = self.owned.keys().copied().collect();
        let is_leaving = self.phase != Phase::Active;
        let must_go = |home: &Home| home.node != self.id && (is_leaving || !self.is_enabled(*home));
        let homes: Vec<Home> = homes.into_iter().filter(must_go).collect();
        let mut out = Vec::new();
        for home in homes {
            let pages = self.lose(home, free);
            free -= pages;
            if pages > 0 {
                out.push(Outgoing::Grant { to: home.node, blocks: vec![Block { home, pages }] });
            }
        }
        out
    }

    /// The manager has given this node up: nobody accepts its pages, and it accepts nobody's.
    fn start_anew(&mut self) -> Vec<Outgoing> {
        self.messages_handled = 0;
        if self.phase == Phase::Recovering {
            return Vec::new();
        }
        self.phase = Phase::Recovering;
        self.wants_to_stay = false;
        self.life += 1;
        self.enabled = BTreeMap::new();
        self.owned = BTreeMap::new();
        vec![Outgoing::Manager(ToManager::Invalidate)]
    }

    fn gain(&mut self, block: Block) {
        if block.pages > 0 {
            *self.owned.entry(block.home).or_default() += block.pages;
        }
    }

    fn lose(&mut self, home: Home, at_most: u64) -> u64 {
        let Some(owned) = self.owned.get_mut(&home) else { return 0 };
        let pages = at_most.min(*owned);
        *owned -= pages;
        if *owned == 0 {
            self.owned.remove(&home);
        }
        pages
    }
}

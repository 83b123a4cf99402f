//! Tracks every node's membership at the manager.
//!
//! The states follow the paper's figure 2 and sections III-C1, C3 and C4:
//!
//! | from | on | to |
//! |---|---|---|
//! | unknown, Inactive | Register | Active |
//! | unknown | Statistics (a manager that has restarted) | Active |
//! | Active | Leave-Req | Leaving |
//! | Leaving | Stay | Active |
//! | Leaving | no other node owns pages there, and the node owns none elsewhere | Inactive |
//! | Active, Leaving | Invalidate, or the node is given up | Recovery |
//! | Recovery | every other node has invalidated, and the node has come back | Inactive |
//!
//! Some things go beyond the paper. Its nodes confirm with *any* statistics that show no pages,
//! even if the node had not heard of the matter. Here, only statistics count which say that the
//! node acted upon the message. A node that fails while another is leaving would be waited for
//! without end. So [`Membership::lost`] lets the manager give a node up. Where homes refuse
//! requests for pages of a former incarnation, a silent node need neither be given up nor waited
//! for: [`Membership::excuse`]. A node that leaves may decide to stay.

use super::message::{Holdings, ToManager, ToNode};
use super::{Home, NodeId, grants::Forward};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// Where a node stands.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NodeState {
    /// Takes no part.
    Inactive,
    /// Lends and borrows.
    #[default]
    Active,
    /// Its lent and borrowed pages go home.
    Leaving,
    /// The other nodes forget the pages that it lent.
    Recovery,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct Entry {
    state: NodeState,
    /// Incarnation of the last registration.
    life: u64,
    /// Messages sent to it since it connected, of those that it counts too.
    sent: u64,
    /// Last statistics in this incarnation.
    holdings: Option<Holdings>,
    /// For Leaving and Recovery: who has yet to confirm, and the message that they must have acted
    /// upon.
    unconfirmed: BTreeMap<NodeId, u64>,
    /// In Recovery: it has come back, and waits to be let in.
    has_returned: bool,
}

/// All nodes that the manager has heard of.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub struct Membership {
    nodes: BTreeMap<NodeId, Entry>,
    /// Those that wait for others: Leaving, Recovery.
    pending: BTreeSet<NodeId>,
}

/// Messages that the manager must send.
pub type Sends = Vec<(NodeId, ToNode)>;

impl Membership {
    /// Acts upon what a node said. [`ToManager::GrantAny`] changes nothing here: see
    /// [`super::grants`].
    pub fn handle(&mut self, from: NodeId, message: ToManager) -> Sends {
        let mut sends = Vec::new();
        match message {
            ToManager::Register { life } => self.register(from, life, &mut sends),
            ToManager::Statistics(holdings) => self.statistics(from, holdings, &mut sends),
            ToManager::GrantAny { .. } => {}
            ToManager::LeaveReq => self.leave(from, &mut sends),
            ToManager::Stay => self.stay(from, &mut sends),
            ToManager::Invalidate => {
                self.recover(from, true, &mut sends);
                self.settle(&mut sends);
            }
        }
        sends
    }

    /// Gives up a node that has not been heard of for too long. The pages that it owned stay
    /// unknown (see [`Membership::lost_pages`]), and the pages that it lent are invalid. If it
    /// lives, it hears so when it sends statistics again.
    pub fn lost(&mut self, node: NodeId) -> Sends {
        let mut sends = Vec::new();
        if self.is_present(node) {
            self.recover(node, false, &mut sends);
            self.settle(&mut sends);
        }
        sends
    }

    /// Lets recovering nodes go on without this node, which is silent. Its pages at their homes are
    /// of a former incarnation. It hears so when it is back; until then the home refuses it. A
    /// *leaving* node still waits: pages that are owned there are good.
    pub fn excuse(&mut self, node: NodeId) -> Sends {
        let mut sends = Vec::new();
        for waiting in &self.pending {
            if let Some(entry) = self.nodes.get_mut(waiting)
                && entry.state == NodeState::Recovery
            {
                entry.unconfirmed.remove(&node);
            }
        }
        self.settle(&mut sends);
        sends
    }

    /// Counts a node's messages anew: those that it has not acted upon are lost. It hears again the
    /// messages that it must act upon for other nodes to leave or recover.
    pub fn reconnect(&mut self, node: NodeId) -> Sends {
        let mut sends = Vec::new();
        let Some(entry) = self.nodes.get_mut(&node) else { return sends };
        entry.sent = 0;
        if !self.is_present(node) {
            return sends;
        }
        let active = self.nodes.iter().filter(|(_, entry)| entry.state == NodeState::Active);
        let homes = active.map(|(&home, entry)| Home { node: home, life: entry.life });
        sends.extend(homes.map(|home| (node, ToNode::EnableNode(home))));
        let waits = |one: &NodeId| self.nodes[one].unconfirmed.contains_key(&node);
        let waiting: Vec<NodeId> = self.pending.iter().copied().filter(waits).collect();
        self.ask_to_confirm(node, waiting, &mut sends);
        sends
    }

    /// Has a node act upon the leaving or the recovery of others.
    fn ask_to_confirm(&mut self, node: NodeId, of: Vec<NodeId>, sends: &mut Sends) {
        for one in of.into_iter().filter(|one| *one != node) {
            let message = match self.state(one) {
                NodeState::Leaving => ToNode::ForceReturn(one),
                _ => ToNode::Invalidate(one),
            };
            self.send(node, message, sends);
            let sent = self.nodes[&node].sent;
            if let Some(entry) = self.nodes.get_mut(&one) {
                entry.unconfirmed.insert(node, sent);
            }
        }
    }

    /// A node has ended, in good order or for good: nothing of it is remembered, and nobody waits
    /// for it.
    pub fn forget(&mut self, node: NodeId) -> Sends {
        let mut sends = Vec::new();
        if self.nodes.remove(&node).is_some() {
            self.pending.remove(&node);
            self.wait_no_longer_for(node);
            self.settle(&mut sends);
        }
        sends
    }

    /// Whether somebody leaves or recovers.
    pub fn is_anybody_pending(&self) -> bool {
        !self.pending.is_empty()
    }

    /// The life of a node's last registration; `None` if it was never heard of.
    pub fn life(&self, node: NodeId) -> Option<u64> {
        self.nodes.get(&node).map(|entry| entry.life)
    }

    /// Whether a node that recovers has come back, and waits for others only.
    pub fn has_returned(&self, node: NodeId) -> bool {
        self.nodes.get(&node).is_some_and(|entry| entry.has_returned)
    }

    /// The messages that carry out what the second level decided, for those nodes that are still
    /// Active.
    pub fn forward(&mut self, forwards: &[Forward]) -> Sends {
        let mut sends = Vec::new();
        for &Forward { from, to, pages } in forwards {
            let is_active = |node| self.state(node) == NodeState::Active;
            if is_active(from) && is_active(to) {
                self.send(from, ToNode::GrantFwd { pages, to }, &mut sends);
            }
        }
        sends
    }

    /// Where a node stands; one that was never heard of is Inactive.
    pub fn state(&self, node: NodeId) -> NodeState {
        self.nodes.get(&node).map_or(NodeState::Inactive, |entry| entry.state)
    }

    /// The last statistics of each Active node: those that grants are made among.
    pub fn active(&self) -> impl Iterator<Item = (NodeId, &Holdings)> {
        self.nodes.iter().filter_map(|(&node, entry)| {
            let holdings = entry.holdings.as_ref()?;
            (entry.state == NodeState::Active).then_some((node, holdings))
        })
    }

    /// Pages of this node's memory that nobody is known to own, as the paper counts what was lost
    /// with failed nodes (III-C4): its pages less those that somebody reports. An approximation,
    /// since reports are of different moments and what is under way is in none of them.
    pub fn lost_pages(&self, node: NodeId) -> u64 {
        let Some(entry) = self.nodes.get(&node) else { return 0 };
        let Some(holdings) = &entry.holdings else { return 0 };
        let home = Home { node, life: entry.life };
        let reports = self.nodes.values().filter_map(|entry| entry.holdings.as_ref());
        let owned = reports.map(|report| owned_at(report, home)).sum();
        holdings.home_pages.saturating_sub(owned)
    }

    fn register(&mut self, node: NodeId, life: u64, sends: &mut Sends) {
        if self.state(node) != NodeState::Inactive {
            return;
        }
        let entry = Entry {
            state: NodeState::Active,
            life,
            sent: 0,
            holdings: None,
            unconfirmed: BTreeMap::new(),
            has_returned: false,
        };
        self.nodes.insert(node, entry);
        self.introduce(node, sends);
    }

    /// Tells a new node of all Active ones, and those of it.
    fn introduce(&mut self, new: NodeId, sends: &mut Sends) {
        let life = self.nodes[&new].life;
        for (&node, entry) in &self.nodes {
            if entry.state == NodeState::Active {
                sends.push((new, ToNode::EnableNode(Home { node, life: entry.life })));
                if node != new {
                    sends.push((node, ToNode::EnableNode(Home { node: new, life })));
                }
            }
        }
    }

    fn statistics(&mut self, from: NodeId, holdings: Holdings, sends: &mut Sends) {
        match self.nodes.get_mut(&from) {
            None => {
                let life = holdings.life;
                self.register(from, life, sends);
                // It was here before this manager: it may own what others are waiting for.
                let pending = self.pending.iter().copied().collect();
                self.ask_to_confirm(from, pending, sends);
                if let Some(entry) = self.nodes.get_mut(&from) {
                    entry.holdings = Some(holdings);
                }
            }
            Some(entry) if holdings.life != entry.life => {}
            // It was given up and is alive. The other nodes forget the pages that it lent, so it
            // must start anew.
            Some(entry) if entry.state == NodeState::Recovery => {
                if !entry.has_returned {
                    self.send(from, ToNode::Invalidate(from), sends);
                }
            }
            Some(entry) if entry.state == NodeState::Inactive => {}
            Some(entry) => {
                entry.holdings = Some(holdings);
                self.confirm(from);
                self.settle(sends);
            }
        }
    }

    fn leave(&mut self, node: NodeId, sends: &mut Sends) {
        let Some(entry) = self.nodes.get_mut(&node) else { return };
        if entry.state == NodeState::Active {
            entry.state = NodeState::Leaving;
            self.tell_others(node, &ToNode::ForceReturn(node), sends);
            self.settle(sends);
        }
    }

    /// A node that is let stay is introduced anew: all others have been told to accept none of its
    /// pages.
    fn stay(&mut self, node: NodeId, sends: &mut Sends) {
        match self.state(node) {
            NodeState::Leaving => {
                self.pending.remove(&node);
                if let Some(entry) = self.nodes.get_mut(&node) {
                    entry.state = NodeState::Active;
                    entry.unconfirmed.clear();
                }
                self.introduce(node, sends);
                self.send(node, ToNode::StayNotify, sends);
            }
            // A manager that has restarted has not heard that it wanted to leave.
            NodeState::Active => self.send(node, ToNode::StayNotify, sends),
            // It has left meanwhile, or cannot stay as it is.
            NodeState::Inactive | NodeState::Recovery => {}
        }
    }

    /// Takes a node out whose memory is lost, because it says so (`has_returned`) or is given up.
    fn recover(&mut self, node: NodeId, has_returned: bool, sends: &mut Sends) {
        let Some(entry) = self.nodes.get_mut(&node) else {
            // Nobody owns anything of a node that was never here.
            self.nodes.insert(
                node,
                Entry {
                    state: NodeState::Recovery,
                    life: 0,
                    sent: 0,
                    holdings: None,
                    unconfirmed: BTreeMap::new(),
                    has_returned,
                },
            );
            self.pending.insert(node);
            self.tell_others(node, &ToNode::Invalidate(node), sends);
            return;
        };
        let was = std::mem::replace(&mut entry.state, NodeState::Recovery);
        entry.has_returned |= has_returned;
        entry.holdings = None;
        // This incarnation has not received the messages to the former one.
        entry.sent = 0;
        if was != NodeState::Recovery {
            self.tell_others(node, &ToNode::Invalidate(node), sends);
        }
        self.wait_no_longer_for(node);
    }

    /// Tells all other nodes that are here of `node`, and has it wait for them. A node that leaves
    /// waits for itself too: until it owns nothing of others.
    fn tell_others(&mut self, node: NodeId, message: &ToNode, sends: &mut Sends) {
        let is_leaving = self.nodes[&node].state == NodeState::Leaving;
        let here: Vec<NodeId> =
            self.nodes.keys().copied().filter(|&other| self.is_present(other)).collect();
        let mut unconfirmed = BTreeMap::new();
        for other in here {
            if other != node {
                self.send(other, message.clone(), sends);
                unconfirmed.insert(other, self.nodes[&other].sent);
            } else if is_leaving {
                unconfirmed.insert(node, 0);
            }
        }
        if let Some(entry) = self.nodes.get_mut(&node) {
            entry.unconfirmed = unconfirmed;
        }
        self.pending.insert(node);
    }

    /// Takes note of what `from`'s statistics confirm.
    fn confirm(&mut self, from: NodeId) {
        if self.pending.is_empty() {
            return;
        }
        let Some(report) = self.nodes.get(&from).and_then(|entry| entry.holdings.clone()) else {
            return;
        };
        for &node in &self.pending {
            let Some(entry) = self.nodes.get_mut(&node) else { continue };
            let Some(&message) = entry.unconfirmed.get(&from) else { continue };
            let is_clear = match from == node {
                true => report.owned.iter().all(|block| block.home.node == node),
                false => report.owned.iter().all(|block| block.home.node != node),
            };
            if is_clear && report.messages_handled >= message {
                entry.unconfirmed.remove(&from);
            }
        }
    }

    /// Moves on whoever waits for nobody any more. One that has left is not waited for either, so
    /// that may let others go in turn.
    fn settle(&mut self, sends: &mut Sends) {
        let is_done = |node: &NodeId| {
            let entry = &self.nodes[node];
            let may_go = entry.state == NodeState::Leaving || entry.has_returned;
            entry.unconfirmed.is_empty() && may_go
        };
        let Some(node) = self.pending.iter().copied().find(is_done) else { return };
        self.pending.remove(&node);
        if let Some(entry) = self.nodes.get_mut(&node) {
            let message = match entry.state {
                NodeState::Leaving => ToNode::LeaveNotify,
                _ => ToNode::InvalidateNotify,
            };
            entry.state = NodeState::Inactive;
            entry.has_returned = false;
            entry.holdings = None;
            self.send(node, message, sends);
        }
        self.wait_no_longer_for(node);
        self.settle(sends);
    }

    /// A node that owns nothing of others, or whose life is over, has nothing to confirm.
    fn wait_no_longer_for(&mut self, node: NodeId) {
        for &waiting in &self.pending {
            if let Some(entry) = self.nodes.get_mut(&waiting) {
                entry.unconfirmed.remove(&node);
            }
        }
    }

    fn is_present(&self, node: NodeId) -> bool {
        matches!(self.state(node), NodeState::Active | NodeState::Leaving)
    }

    fn send(&mut self, to: NodeId, message: ToNode, sends: &mut Sends) {
        if let Some(entry) = self.nodes.get_mut(&to) {
            entry.sent += u64::from(message.is_counted());
            sends.push((to, message));
        }
    }
}

/// Pages of `home` that the report has as owned.
fn owned_at(report: &Holdings, home: Home) -> u64 {
    report.owned.iter().filter(|block| block.home == home).map(|block| block.pages).sum()
}

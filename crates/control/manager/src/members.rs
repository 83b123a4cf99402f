//! Tracks each node's membership: drives the pure [`Membership`] with heartbeats.
//!
//! A heartbeat tells the node's phase, what it holds of which node, and how many orders it has
//! heard. The manager asks the state machine for what the phase calls for, until the states agree.
//! Each answer repeats the state machine's orders until the node has heard them. So lost answers
//! and restarted managers need no other handling. A manager that knows nothing begins a new
//! conversation with each node, in which the node reports everything.
//!
//! *Enable-Node* is no order here: nodes learn from the list of donors
//! ([`Roster`](crate::roster::Roster)) whose memory they may use. Orders for it would grow with the
//! square of the nodes when a cluster forms.

use crate::registry::MAX_NODES;
use hecaton_memory::random_u64;
use hecaton_node::cluster::report::{MemberReport, NodeReport, Order, Orders};
use hecaton_policy::cluster::member::Phase;
use hecaton_policy::cluster::membership::{Membership, NodeState, Sends};
use hecaton_policy::cluster::message::{Block, Holdings, ToManager, ToNode};
use hecaton_policy::cluster::{Home, NodeId};
use std::collections::{BTreeMap, VecDeque};

/// Most orders that wait to be heard by one node. Beyond that its conversation begins anew.
const MAX_ORDERS: usize = 4 * MAX_NODES;

/// Membership of all nodes, and the conversations with them.
#[derive(Debug, Default)]
pub(crate) struct Members {
    membership: Membership,
    ids: BTreeMap<String, NodeId>,
    next_id: u32,
    conversations: BTreeMap<NodeId, Conversation>,
}

/// With one node, until it or the manager is another.
#[derive(Debug)]
struct Conversation {
    name: String,
    session: u64,
    /// Orders that the node has heard.
    heard: u64,
    unheard: VecDeque<ToNode>,
}

impl Conversation {
    fn begin(name: &str) -> Conversation {
        // Random: a manager without a registry on disk does not know which numbers its predecessor
        // has used. The number is only compared with the node's. Nodes without a conversation
        // report zero.
        let session = random_u64().max(1);
        Conversation { name: name.to_owned(), session, heard: 0, unheard: VecDeque::new() }
    }

    fn hear(&mut self, heard: u64) {
        while self.heard < heard && self.unheard.pop_front().is_some() {
            self.heard += 1;
        }
    }

    fn awaits(&self, message: &ToNode) -> bool {
        self.unheard.contains(message)
    }
}

impl Members {
    /// Handles a heartbeat and returns the node's orders. `is_replaced`: an earlier incarnation of
    /// the node was known and did not end in good order. `home` gives the node of a donor, `silent`
    /// the silent nodes.
    pub(crate) fn heartbeat<'a>(
        &mut self,
        report: &NodeReport,
        is_replaced: bool,
        home: impl Fn(&str) -> Option<&'a str>,
        silent: impl Iterator<Item = &'a str>,
    ) -> Orders {
        let id = self.id(&report.name);
        let said = report.member;
        let is_known =
            self.conversations.get(&id).is_some_and(|known| known.session == said.session);
        // The answer that told it so may have been lost.
        let is_replaced =
            is_replaced || !is_known && self.state(&report.name) == NodeState::Recovery;
        if !is_known {
            self.conversations.insert(id, Conversation::begin(&report.name));
            let sends = self.membership.reconnect(id);
            self.post(sends);
        }
        if let Some(conversation) = self.conversations.get_mut(&id) {
            conversation.hear(if is_known { said.heard } else { 0 });
        }
        let holdings = self.holdings(id, report, home);
        if is_replaced && said.phase != Phase::Recovering {
            // It does not know of its former life: its directory is gone.
            self.begin_anew(id);
        } else {
            self.understand(id, &said, holdings);
        }
        if self.membership.is_anybody_pending() {
            for silent in silent {
                let silent = self.id(silent);
                let sends = self.membership.excuse(silent);
                self.post(sends);
            }
        }
        self.orders(id)
    }

    /// Has a node be let in again, when the others have forgotten what it lent in another life.
    fn begin_anew(&mut self, id: NodeId) {
        self.post(vec![(id, ToNode::Invalidate(id))]);
        self.tell(id, ToManager::Invalidate);
    }

    /// Asks of the state machine what follows from where the node stands and is not so yet.
    fn understand(&mut self, id: NodeId, said: &MemberReport, holdings: Holdings) {
        let state = self.membership.state(id);
        let is_unknown = self.membership.life(id).is_none();
        match said.phase {
            Phase::Recovering => {
                let waits = state == NodeState::Recovery && self.membership.has_returned(id);
                if !waits && !self.awaits(id, &ToNode::InvalidateNotify) {
                    self.tell(id, ToManager::Invalidate);
                }
            }
            Phase::Active => {
                let life = said.life;
                let is_told = [ToNode::LeaveNotify, ToNode::Invalidate(id)];
                if is_told.iter().any(|message| self.awaits(id, message)) {
                    // It does not stand there any more.
                } else if state != NodeState::Inactive
                    && self.membership.life(id).is_some_and(|known| known != life)
                {
                    // Another manager let the node leave and join again. This one knows only the
                    // former incarnation, and the nodes that must forget it.
                    self.begin_anew(id);
                } else if is_unknown || state != NodeState::Inactive {
                    self.tell(id, ToManager::Statistics(holdings));
                } else {
                    self.tell(id, ToManager::Register { life });
                    self.tell(id, ToManager::Statistics(holdings));
                }
            }
            Phase::Leaving => {
                if is_unknown {
                    self.tell(id, ToManager::Statistics(holdings.clone()));
                }
                if said.wants_to_stay {
                    if !self.awaits(id, &ToNode::StayNotify) {
                        self.tell(id, ToManager::Stay);
                    }
                } else if self.membership.state(id) == NodeState::Active {
                    self.tell(id, ToManager::LeaveReq);
                }
                if state == NodeState::Inactive
                    && !is_unknown
                    && !self.awaits(id, &ToNode::LeaveNotify)
                {
                    // It was told, in a conversation that has ended.
                    self.post(vec![(id, ToNode::LeaveNotify)]);
                }
                self.tell(id, ToManager::Statistics(holdings));
            }
            Phase::Inactive => {}
        }
    }

    /// Pages that the node owns: its own memory, and its consumers' pages at other nodes' donors.
    fn holdings<'a>(
        &mut self,
        id: NodeId,
        report: &NodeReport,
        home: impl Fn(&str) -> Option<&'a str>,
    ) -> Holdings {
        let mut pages = BTreeMap::<&str, u64>::new();
        for (donor, held) in report.held_at_donors() {
            if let Some(home) = home(donor).filter(|home| *home != report.name) {
                *pages.entry(home).or_default() += held;
            }
        }
        let home_pages: u64 =
            report.donors.iter().filter_map(|donor| donor.stats.as_ref()).map(|s| s.pages).sum();
        let own = Home { node: id, life: report.member.life };
        let mut owned = vec![Block { home: own, pages: home_pages }];
        for (home, pages) in pages {
            let node = self.id(home);
            let life = self.membership.life(node).unwrap_or_default();
            owned.push(Block { home: Home { node, life }, pages });
        }
        let lendable = report.donors.iter().filter_map(|donor| donor.stats.as_ref());
        Holdings {
            life: report.member.life,
            messages_handled: report.member.messages_handled,
            home_pages,
            free_pages: lendable.map(|stats| stats.lendable_pages).sum(),
            wanted_pages: 0,
            owned,
        }
    }

    /// A node has ended in good order, or is gone for good.
    pub(crate) fn forget(&mut self, name: &str) {
        if let Some(id) = self.ids.remove(name) {
            self.conversations.remove(&id);
            let sends = self.membership.forget(id);
            self.post(sends);
        }
    }

    /// Where a node stands; one that was not heard yet takes part for all that is known.
    pub(crate) fn state(&self, name: &str) -> NodeState {
        let id = self.ids.get(name).filter(|id| self.conversations.contains_key(id));
        let Some(id) = id else { return NodeState::Active };
        self.membership.state(*id)
    }

    fn tell(&mut self, from: NodeId, message: ToManager) {
        let sends = self.membership.handle(from, message);
        self.post(sends);
    }

    fn post(&mut self, sends: Sends) {
        for (to, message) in sends {
            if matches!(message, ToNode::EnableNode(_)) {
                continue;
            }
            let Some(conversation) = self.conversations.get_mut(&to) else { continue };
            conversation.unheard.push_back(message);
            if conversation.unheard.len() > MAX_ORDERS {
                // It hears all that counts when it speaks again.
                *conversation = Conversation::begin(&conversation.name);
            }
        }
    }

    fn awaits(&self, id: NodeId, message: &ToNode) -> bool {
        self.conversations.get(&id).is_some_and(|known| known.awaits(message))
    }

    fn orders(&self, id: NodeId) -> Orders {
        let Some(known) = self.conversations.get(&id) else { return Orders::default() };
        let orders = known.unheard.iter().map(|message| self.order(message));
        Orders { session: known.session, first: known.heard, orders: orders.collect() }
    }

    fn order(&self, message: &ToNode) -> Order {
        let name = |id: &NodeId| {
            self.conversations.get(id).map_or_else(String::new, |known| known.name.clone())
        };
        match message {
            ToNode::ForceReturn(node) => Order::ForceReturn { node: name(node) },
            ToNode::Invalidate(node) => Order::Invalidate { node: name(node) },
            ToNode::LeaveNotify => Order::LeaveNotify,
            ToNode::StayNotify => Order::StayNotify,
            ToNode::InvalidateNotify => Order::InvalidateNotify,
            ToNode::EnableNode(_) | ToNode::GrantFwd { .. } => {
                unreachable!("not posted: donors are listed, and give out extents themselves")
            }
        }
    }

    fn id(&mut self, name: &str) -> NodeId {
        if let Some(id) = self.ids.get(name) {
            return *id;
        }
        self.next_id += 1;
        let id = NodeId(self.next_id);
        self.ids.insert(name.to_owned(), id);
        id
    }
}

#[cfg(test)]
mod tests {
    use crate::registry::{MemberState, NodeState, Registry};
    use hecaton_donor::Snapshot;
    use hecaton_memory::SplitMix;
    use hecaton_node::cluster::membership::Membership;
    use hecaton_node::cluster::report::NodeReport;
    use hecaton_node::donors::DonorReport;
    use hecaton_pager::DonorUse;
    use hecaton_policy::cluster::member::Phase;
    use std::collections::{BTreeMap, BTreeSet};
    use std::time::Duration;

    const NAMES: [&str; 3] = ["a", "b", "c"];

    /// A node as its manager sees it.
    struct Node {
        name: &'static str,
        boot: u64,
        /// `None` while it is down.
        membership: Option<Membership>,
        /// When it is back.
        back: Duration,
        /// Bytes that its consumers have at others' donors, and when they find that these are gone.
        held: BTreeMap<&'static str, (u64, Option<Duration>)>,
        draining: bool,
        /// Nodes that were silent at some time since this node's last crash.
        excused: BTreeSet<String>,
    }

    impl Node {
        fn new(name: &'static str, life: u64) -> Node {
            Node {
                name,
                boot: life,
                membership: Some(Membership::start(name, life, 1000, false)),
                back: Duration::ZERO,
                held: BTreeMap::new(),
                draining: false,
                excused: BTreeSet::new(),
            }
        }

        fn report(&self) -> Option<NodeReport> {
            let donor = DonorReport {
                name: self.name.to_owned(),
                stats: Some(Snapshot { pages: 1000, ..Snapshot::default() }),
                ..DonorReport::default()
            };
            let mut program = crate::watching::overview::tests::program("p", 1);
            let held = self.held.iter().map(|(name, (bytes, _))| DonorUse {
                name: (*name).to_owned(),
                bytes: *bytes,
                ..DonorUse::default()
            });
            program.stats.as_mut()?.pool.donors = held.collect();
            Some(NodeReport {
                name: self.name.to_owned(),
                boot: self.boot,
                member: self.membership.as_ref()?.report(),
                donors: vec![donor],
                consumers: vec![program],
                ..NodeReport::default()
            })
        }

        fn phase(&self) -> Option<Phase> {
            Some(self.membership.as_ref()?.report().phase)
        }
    }

    struct World {
        registry: Registry,
        nodes: Vec<Node>,
        now: Duration,
        random: SplitMix,
        /// In how many of ten thousand steps something happens.
        trouble: u64,
        restarts: bool,
        recoveries: u32,
        seed: u64,
    }

    impl World {
        fn new(seed: u64, restarts: bool) -> World {
            let nodes = NAMES.iter().zip(1..).map(|(name, life)| Node::new(name, life));
            World {
                registry: Registry::default(),
                nodes: nodes.collect(),
                now: Duration::from_secs(100),
                random: SplitMix::new(seed),
                trouble: 0,
                restarts,
                recoveries: 0,
                seed,
            }
        }

        fn happens(&mut self) -> bool {
            let drawn = self.random.draw() % 10_000;
            drawn < self.trouble
        }

        fn below(&mut self, end: u64) -> u64 {
            self.random.draw() % end
        }

        /// A second: everybody says how it is, and perhaps something happens to it.
        fn second(&mut self) {
            self.now += Duration::from_secs(1);
            if self.restarts && self.happens() {
                self.registry = Registry::default();
            }
            let status = self.registry.status(self.now);
            let silent = status.nodes.iter().filter(|node| node.state == NodeState::Silent);
            let silent: Vec<&String> = silent.map(|node| &node.report.name).collect();
            for node in &mut self.nodes {
                node.excused.extend(silent.iter().map(|name| (*name).clone()));
            }
            for index in 0..self.nodes.len() {
                let at = self.now;
                self.nodes[index].held.retain(|_, (_, until)| until.is_none_or(|until| at < until));
                if self.happens() {
                    self.crash(index);
                }
                if self.happens() {
                    self.nodes[index].draining ^= true;
                    let (name, draining) = (self.nodes[index].name, self.nodes[index].draining);
                    // A manager that has just restarted may not know it yet.
                    self.nodes[index].draining = self.registry.drain(name, draining) && draining;
                }
                self.come_back(index);
                self.beat(index);
            }
        }

        fn crash(&mut self, index: usize) {
            let back = self.now + Duration::from_secs(self.below(9));
            let node = &mut self.nodes[index];
            (node.membership, node.back) = (None, back);
            node.held.clear();
            node.excused.clear();
            let lost = node.name;
            for other in 0..self.nodes.len() {
                let found = self.now + Duration::from_secs(self.below(15));
                if let Some((_, until)) = self.nodes[other].held.get_mut(lost) {
                    *until = Some(found);
                }
            }
        }

        fn come_back(&mut self, index: usize) {
            let (life, keeps_directory) = (self.random.draw(), self.below(2) == 0);
            let node = &mut self.nodes[index];
            if node.membership.is_some() || self.now < node.back {
                return;
            }
            if !keeps_directory {
                node.boot = life;
            }
            node.membership = Some(Membership::start(node.name, life, 1000, keeps_directory));
        }

        fn beat(&mut self, index: usize) {
            let Some(report) = self.nodes[index].report() else { return };
            if self.happens() {
                return;
            }
            // Another of its name is up for all that the manager knows, until that is silent.
            let Ok(answer) = self.registry.heartbeat(self.now, &report.name, report.clone()) else {
                return;
            };
            if self.happens() {
                return;
            }
            let life = self.random.draw();
            let before = self.nodes[index].phase();
            // It does not leave while its programs have memory of others.
            let leaves =
                answer.draining.contains(&report.name) && self.nodes[index].held.is_empty();
            if let Some(membership) = &mut self.nodes[index].membership {
                membership.follow(&answer.orders, leaves, life);
            }
            let after = self.nodes[index].phase();
            if before == Some(Phase::Recovering) && after == Some(Phase::Active) {
                self.recoveries += 1;
                self.check_forgotten(index);
            }
            if after == Some(Phase::Active) && self.below(4) == 0 {
                self.borrow_from(index);
            }
        }

        /// Somebody takes memory of a node that lends.
        fn borrow_from(&mut self, index: usize) {
            let lender = self.nodes[index].name;
            let borrower = self.below(NAMES.len() as u64) as usize;
            // The manager cannot wait for a node that it does not know as active. Homes refuse it.
            let node = &self.nodes[borrower];
            let status = self.registry.status(self.now);
            let is_known = status.nodes.iter().any(|known| {
                let is_it = known.report.name == node.name && known.report.boot == node.boot;
                is_it && known.membership == MemberState::Active
            });
            let borrows = is_known && node.phase() == Some(Phase::Active);
            if borrower != index && borrows && !self.nodes[index].draining {
                self.nodes[borrower].held.entry(lender).or_insert((1 << 24, None));
            }
        }

        /// Nobody that the manager hears has what the node had lent in a former life.
        fn check_forgotten(&self, index: usize) {
            let (lender, excused) = (self.nodes[index].name, &self.nodes[index].excused);
            let status = self.registry.status(self.now);
            for other in self.nodes.iter().filter(|other| other.membership.is_some()) {
                let is_heard = status.nodes.iter().any(|node| {
                    let is_it = node.report.name == other.name && node.report.boot == other.boot;
                    is_it && node.state == NodeState::Up && !excused.contains(other.name)
                });
                let old = other.held.get(lender).is_some_and(|(_, until)| until.is_some());
                let name = other.name;
                let seed = self.seed;
                assert!(
                    !is_heard || self.restarts || !old,
                    "seed {seed}: {name} counts on {lender}"
                );
            }
        }

        /// With all well, everybody takes part.
        fn check_calm(&mut self, seed: u64) {
            self.trouble = 0;
            for node in &mut self.nodes {
                node.draining = false;
                self.registry.drain(node.name, false);
            }
            for _ in 0..40 {
                for node in &mut self.nodes {
                    // The drain has moved all memory.
                    node.held.clear();
                }
                self.second();
            }
            let status = self.registry.status(self.now);
            for (node, known) in self.nodes.iter().zip(&status.nodes) {
                assert_eq!(node.phase(), Some(Phase::Active), "seed {seed}: {}", node.name);
                assert_eq!(known.membership, MemberState::Active, "seed {seed}: {}", node.name);
            }
        }
    }

    /// Nodes crash, lose directories or messages, leave and stay; managers restart. No node lends
    /// again while a heard node counts on its former memory. In the end every node is active.
    #[test]
    fn who_comes_back_is_let_in_when_its_former_life_is_forgotten() {
        let mut recoveries = 0;
        for seed in 0..100 {
            let mut world = World::new(seed, seed % 4 == 0);
            world.second();
            world.trouble = 200;
            for _ in 0..120 {
                world.second();
            }
            world.check_calm(seed);
            recoveries += world.recoveries;
        }
        assert!(recoveries > 100, "{recoveries} recoveries only: nothing was tried");
    }
}

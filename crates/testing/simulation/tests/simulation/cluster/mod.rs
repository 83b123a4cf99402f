//! Managers, the keeper of their registry, nodes, and an operator. They decide which donors exist,
//! and what these must do. Spaces go on with the donors that they know when all of that is away.
//!
//! The election, the registry and its book, and the node's directory are the product's. Letters
//! stand for HTTP requests and answers. The clock of all this runs faster than that of pages, since
//! its times are longer. The registry is with a keeper, as with etcd, and managers take turns; or
//! one manager has it in a file.

mod file;
mod keeper;
mod manager;
mod node;
mod operator;

use crate::dice::Dice;
use crate::donor::Donor;
use crate::network::{Event, Host, Network};
use crate::pool::Pool;
use crate::tally::Tally;
use file::File;
use hecaton_manager::records::election::{Ask, Heard, Term};
use hecaton_manager::records::lasting::{Changes, Lasting};
use hecaton_manager::records::pen::{Stamp, Stroke};
use hecaton_memory::PAGE_SIZE;
use hecaton_node::cluster::report::{HeartbeatAnswer, NodeReport};
use keeper::{Keeper, Process};
use manager::Manager;
use node::Node;
use operator::{Operator, Order};
use std::collections::BTreeMap;
use std::time::Duration;

/// Pages by donor, by node. A node without consumers is not in it.
pub(crate) type Borrowed = BTreeMap<usize, BTreeMap<usize, u64>>;

/// How much faster than for pages time passes here.
const HASTE: u32 = 6;

const KEEPER: Host = Host(200);
const OPERATOR: Host = Host(300);

fn manager_host(number: usize) -> Host {
    Host(100 + number)
}

/// Message between two machines, other than a page request.
#[derive(Debug)]
pub(crate) struct Letter {
    pub(crate) from: Host,
    pub(crate) to: Host,
    /// The sender's number for what it asks, and for its answer.
    call: u64,
    body: Body,
}

impl Letter {
    /// The letter when it is garbled: the side that asked hears that the connection ends.
    pub(crate) fn garbled(self) -> Letter {
        let Letter { from, to, call, body } = self;
        let (is_answer, body) = match body {
            Body::Request(_) => (false, Body::Reply(Reply::Broken)),
            Body::Question(process, _) | Body::Considered(process, _) => {
                (false, Body::Answer(process, Answer::Broken))
            }
            Body::Reply(_) => (true, Body::Reply(Reply::Broken)),
            Body::Answer(process, _) => (true, Body::Answer(process, Answer::Broken)),
        };
        let (from, to) = if is_answer { (from, to) } else { (to, from) };
        Letter { from, to, call, body }
    }
}

#[derive(Debug)]
enum Body {
    /// To a manager, and from it.
    Request(Request),
    Reply(Reply),
    /// From a manager's process to the keeper, and back.
    Question(Process, Question),
    /// One that the keeper has had for a while.
    Considered(Process, Question),
    Answer(Process, Answer),
}

#[derive(Debug)]
enum Request {
    Beat(Box<NodeReport>),
    Drain(String, bool),
    Limit(String, Option<u64>),
}

#[derive(Debug)]
enum Reply {
    /// The registry's refusals are all the same to a node: it tries again.
    Beat(Result<Box<HeartbeatAnswer>, ()>),
    Done,
    NoDonor,
    NotLeading,
    /// It could not be written down, or may have been.
    Unwritten,
    /// There is none: the connection has ended, before or after the request was heard.
    Broken,
}

#[derive(Clone, Debug)]
enum Question {
    /// With the lease that is to be renewed.
    Ask(Ask, Option<Term>),
    Read,
    /// Stamp that the last write has left.
    Look,
    Write(Term, Stroke, Changes),
    Revoke(Term),
}

#[derive(Debug)]
enum Answer {
    Heard(Heard),
    Lasting(Lasting, Option<Stamp>),
    Stamp(Option<Stamp>),
    Written,
    Superseded,
    Overtaken,
    /// There is none: the connection has ended, before or after the question was heard.
    Broken,
}

pub(crate) struct Cluster {
    keeper: Keeper,
    managers: Vec<Manager>,
    nodes: Vec<Node>,
    operator: Operator,
    /// Until then the keeper delays each question, and the manager that asked may not wait for it.
    keeper_slow_until: Duration,
    /// The donor that was last given an order.
    ordered: usize,
    crashes: u64,
    recoveries: u64,
    /// Ticks in which nobody led.
    leaderless: u64,
}

impl Cluster {
    /// A node for each donor, and some managers; or one with a file.
    pub(crate) fn new(donors: &[Donor], has_file: bool, dice: &mut Dice) -> Cluster {
        let several = 1 + dice.below(3) as usize;
        let managers = if has_file { 1 } else { several };
        let manager = |at| Manager::new(at, 1, has_file.then(File::default), Duration::ZERO);
        Cluster {
            keeper: Keeper::default(),
            managers: (0..managers).map(manager).collect(),
            nodes: (donors.iter().enumerate())
                .map(|(at, donor)| Node::new(at, donor.pages(), managers))
                .collect(),
            operator: Operator::new(donors.len(), managers),
            keeper_slow_until: Duration::ZERO,
            ordered: 0,
            crashes: 0,
            recoveries: 0,
            leaderless: 0,
        }
    }

    /// The donors that consumers of a node may borrow from.
    pub(crate) fn known_at(&self, host: Host) -> Vec<usize> {
        self.nodes[host.0].known()
    }

    /// Those of which a node has ever told its consumers.
    pub(crate) fn ever_known_at(&self, host: Host) -> Vec<usize> {
        self.nodes[host.0].ever_known()
    }

    /// `borrowed` says what the consumers of which node have at which donors, in pages.
    pub(crate) fn tick(&mut self, pool: &mut Pool, mut borrowed: Borrowed) {
        let now = pool.net.now * HASTE;
        for manager in &mut self.managers {
            manager.tick(now, &mut pool.net, &mut pool.dice);
        }
        for (at, (node, donor)) in self.nodes.iter_mut().zip(&mut pool.donors).enumerate() {
            let borrowed = borrowed.remove(&at);
            node.tick(now, donor, borrowed, (&mut pool.net, &mut pool.dice));
        }
        self.operator.tick(now, &mut pool.net, &mut pool.dice);
        self.leaderless += u64::from(self.leaders(now) == 0);
        assert!(self.leaders(now) <= 1, "two managers lead at {now:?}");
    }

    /// A donor was lost with its memory: its node begins anew, and lends nothing until the others
    /// have forgotten what it had lent.
    pub(crate) fn lose_memory(&mut self, number: usize, pool: &mut Pool) {
        let knows_itself = pool.dice.below(2) == 0;
        self.nodes[number].lose_memory(knows_itself);
        pool.donors[number].draining = self.nodes[number].drains();
        self.recoveries += 1;
    }

    fn leaders(&self, now: Duration) -> usize {
        self.managers.iter().filter(|manager| manager.leads(now)).count()
    }

    pub(crate) fn receive(&mut self, letter: Letter, pool: &mut Pool) {
        let now = pool.net.now * HASTE;
        let Letter { from, to, call, body } = letter;
        match body {
            Body::Question(process, question) if pool.net.now < self.keeper_slow_until => {
                let at = pool.net.now + Duration::from_micros(pool.dice.below(700_000));
                let body = Body::Considered(process, question);
                pool.net.schedule(at, Event::Letter(Letter { from, to, call, body }));
            }
            Body::Question(process, question) | Body::Considered(process, question) => {
                let answer = match question {
                    Question::Ask(ask, lease) => {
                        Answer::Heard(self.keeper.ask(now, process, ask, lease))
                    }
                    Question::Read => {
                        Answer::Lasting(self.keeper.lasting.clone(), self.keeper.stamp)
                    }
                    Question::Look => Answer::Stamp(self.keeper.stamp),
                    Question::Write(term, stroke, changes) => {
                        self.keeper.write(now, term, stroke, &changes)
                    }
                    Question::Revoke(lease) => return self.keeper.revoke(lease),
                };
                let body = Body::Answer(process, answer);
                pool.net.post(Letter { from: to, to: from, call, body }, &mut pool.dice);
            }
            Body::Reply(reply) if to == OPERATOR => self.operator.receive(call, &reply, now),
            Body::Reply(reply) => self.nodes[to.0].receive(call, reply),
            body @ (Body::Request(_) | Body::Answer(..)) => {
                let letter = Letter { from, to, call, body };
                let manager = &mut self.managers[to.0 - manager_host(0).0];
                manager.receive(letter, now, &mut pool.net, &mut pool.dice);
            }
        }
    }

    /// Most often the one that was given an order before: orders of one thing may overtake each
    /// other.
    fn some_donor(&mut self, dice: &mut Dice) -> usize {
        if dice.below(3) == 0 {
            self.ordered = dice.below(self.nodes.len() as u64) as usize;
        }
        self.ordered
    }

    /// A donor is to drain, or to lend again; sometimes whoever says so changes his mind.
    pub(crate) fn order_drain(&mut self, pool: &mut Pool) {
        let donor = self.some_donor(&mut pool.dice);
        let (drains, insists) = (pool.dice.below(2) == 0, pool.dice.below(2) == 0);
        for turn in 0..1 + pool.dice.below(4) {
            let drains = drains ^ (turn % 2 == 1);
            self.operator.order(donor, Order::Drain(drains), insists);
            pool.tally.drains += 1;
        }
    }

    /// A donor is to lend less than it has, or all again.
    pub(crate) fn order_recall(&mut self, pool: &mut Pool) {
        let donor = self.some_donor(&mut pool.dice);
        let insists = pool.dice.below(2) == 0;
        for _ in 0..1 + pool.dice.below(3) {
            let is_less = pool.dice.below(2) == 0;
            let pages = is_less.then(|| pool.dice.below(pool.donors[donor].pages()));
            let limit = pages.map(|pages| pages * PAGE_SIZE as u64);
            self.operator.order(donor, Order::Limit(limit), insists);
            pool.tally.recalls += 1;
        }
    }

    pub(crate) fn order_limit(&mut self, donor: usize, pages: Option<u64>) {
        let limit = pages.map(|pages| pages * PAGE_SIZE as u64);
        self.operator.order(donor, Order::Limit(limit), true);
    }

    pub(crate) fn order_no_limit(&mut self, donor: usize) {
        self.order_limit(donor, None);
    }

    pub(crate) fn order_no_drain(&mut self, donor: usize) {
        self.operator.order(donor, Order::Drain(false), true);
    }

    /// Processes die and are stopped, machines do not hear each other.
    pub(crate) fn go_wrong(&mut self, pool: &mut Pool) {
        let Pool { net, dice, .. } = pool;
        let now = net.now * HASTE;
        let manager = dice.below(self.managers.len() as u64) as usize;
        let node = dice.below(self.nodes.len() as u64) as usize;
        let other = dice.below(self.nodes.len() as u64) as usize;
        let time = Duration::from_millis(dice.below(2500));
        let long = now + time * HASTE;
        match dice.below(11) {
            0 => {
                self.managers[manager].crash(long, now);
                self.crashes += 1;
            }
            1 | 2 => self.managers[manager].asleep_until = long,
            3 => self.nodes[node].crash(long),
            4 | 5 | 7 | 8 if self.managers[manager].file().is_some() => {
                self.managers[manager].disk_fails(long, dice.below(2) == 0);
            }
            4 => Cluster::part(manager_host(manager), KEEPER, time, net, dice),
            5 => {
                for manager in 0..self.managers.len() {
                    Cluster::part(manager_host(manager), KEEPER, time, net, dice);
                }
            }
            6 => Cluster::part(Host(node), manager_host(manager), time, net, dice),
            7 | 8 => self.keeper_slow_until = net.now + time,
            9 => Cluster::part(OPERATOR, manager_host(manager), time, net, dice),
            _ => Cluster::part(Host(node), Host(other), time, net, dice),
        }
    }

    /// Two machines do not hear each other, or one of them not the other.
    fn part(here: Host, there: Host, time: Duration, net: &mut Network, dice: &mut Dice) {
        let ways = dice.below(3);
        if here != there && ways != 1 {
            net.part(here, there, time);
        }
        if here != there && ways != 2 {
            net.part(there, here, time);
        }
    }

    /// All processes are there, and none is stopped.
    pub(crate) fn heal(&mut self) {
        self.managers.iter_mut().for_each(Manager::heal);
        self.keeper_slow_until = Duration::ZERO;
        self.nodes.iter_mut().for_each(Node::heal);
    }

    /// All managers are started anew: whoever leads then knows only what was written down.
    pub(crate) fn restart_managers(&mut self, pool: &Pool) {
        let now = pool.net.now * HASTE;
        self.managers.iter_mut().for_each(|manager| manager.crash(now, now));
    }

    /// State that outlives the managers.
    fn kept(&self) -> &Lasting {
        self.managers[0].file().map_or(&self.keeper.lasting, |file| &file.lasting)
    }

    /// Whether one manager leads, all nodes follow it and know all donors, and the donors do what
    /// was ordered last.
    pub(crate) fn is_obeyed(&self, pool: &Pool) -> bool {
        let (all, epoch) = (self.nodes.len(), self.kept().epoch);
        let is_whole =
            self.nodes.iter().all(|node| node.known().len() == all && node.follows(epoch));
        let obeys = |(at, node): (usize, &Node)| {
            let donor = &pool.donors[at];
            let pages = node.limit_bytes.map_or(donor.pages(), |bytes| bytes / PAGE_SIZE as u64);
            let is_told = donor.draining == node.drains() && donor.told_pages() == pages;
            let is_in = node.draining || node.takes_part();
            is_told && is_in && self.operator.is_obeyed(at, node.draining, node.limit_bytes)
        };
        let leads = self.leaders(pool.net.now * HASTE) == 1;
        let is_idle = self.operator.is_idle();
        leads && is_idle && is_whole && self.nodes.iter().enumerate().all(obeys)
    }

    /// For a message when that never comes about.
    pub(crate) fn trouble(&self, pool: &Pool) -> String {
        let leaders = self.leaders(pool.net.now * HASTE);
        let nodes = self.nodes.iter().map(|n| (n.known(), n.draining, n.stands(), n.limit_bytes));
        let nodes: Vec<_> = nodes.collect();
        let (told, kept) = (self.operator.words(), self.kept());
        format!("{leaders} lead; told {told}; kept {kept:?}; at the nodes {nodes:?}")
    }

    pub(crate) fn count(&self, tally: &mut Tally) {
        tally.terms += self.keeper.terms();
        for file in self.managers.iter().filter_map(Manager::file) {
            tally.terms += file.opened;
            tally.refused_by_disks += file.refused;
        }
        tally.superseded += self.keeper.superseded;
        tally.overtaken += self.keeper.overtaken;
        tally.orders += self.operator.acknowledged;
        tally.orders_unsure += self.operator.unsure;
        tally.manager_crashes += self.crashes;
        tally.recoveries += self.recoveries;
        tally.leaderless += self.leaderless;
    }
}

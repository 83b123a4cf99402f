//! The simulated cluster: nodes, manager, and the messages between them.

use super::demand::Demands;
use super::machine::{Disk, Machine, Shared};
use super::outcome::{Course, Fairness, Outcome, RunTime, Sample, Standing};
use super::scenario::{Event, Happening, Scenario};
use crate::cluster::grants::{self, Need, Tlp};
use crate::cluster::member::{Member, Phase};
use crate::cluster::membership::{Membership, NodeState};
use crate::cluster::message::{Block, Outgoing, ToManager, ToNode};
use crate::cluster::targets::{Decision, FirstLevel, Policy, Situation};
use crate::cluster::{Home, NodeId};
use std::collections::BTreeMap;

/// Length of a step; messages take one.
const STEP_S: f64 = 0.1;

/// Steps of a period: statistics are sent and targets set every second.
const STEPS_OF_PERIOD: u64 = 10;

/// A run that takes longer has gone wrong.
const MOST_SECONDS: u64 = 20_000;

/// Periods without statistics after which the manager gives a node up.
const SILENT_PERIODS: u64 = 3;

/// Pages that a node spills in a second at most, 32 MiB.
const SPILL_PAGES: u64 = 8192;

struct Node {
    id: NodeId,
    home_pages: u64,
    /// `None`: it is down.
    member: Option<Member>,
    next_life: u64,
    first_level: FirstLevel,
    decision: Decision,
    machines: Vec<Machine>,
    disk: Disk,
}

enum Letter {
    ToManager(NodeId, ToManager),
    ToNode(NodeId, ToNode),
    Grant(NodeId, Vec<Block>),
}

struct Cluster {
    policy: Policy,
    nodes: Vec<Node>,
    membership: Membership,
    /// When each node was last heard of, in periods.
    heard: BTreeMap<NodeId, u64>,
    /// On their way, in the order in which they were sent.
    post: Vec<Letter>,
    step: u64,
    events: Vec<Event>,
    fairness: Fairness,
    outcome: Outcome,
}

/// Runs a scenario to its end, its programs as recorded in `demands`.
pub fn run(demands: &Demands, scenario: Scenario, policy: Policy, seed: u64) -> Outcome {
    let mut cluster = Cluster::new(demands, scenario, policy, seed);
    while !cluster.is_done() && cluster.step < MOST_SECONDS * STEPS_OF_PERIOD {
        cluster.step();
    }
    cluster.end()
}

impl Cluster {
    fn new(demands: &Demands, scenario: Scenario, policy: Policy, seed: u64) -> Cluster {
        let mut post = Vec::new();
        let mut nodes = Vec::new();
        let mut courses = Vec::new();
        for (at, plan) in scenario.nodes(demands, seed).into_iter().enumerate() {
            let id = NodeId(at as u32 + 1);
            let (member, out) = Member::start(id, 1, plan.pool_pages);
            post.extend(out.into_iter().map(|out| letter(id, out)));
            courses.extend(plan.machines.iter().map(|machine| Course {
                node: id,
                machine: machine.name.clone(),
                samples: Vec::new(),
            }));
            nodes.push(Node {
                id,
                home_pages: plan.pool_pages,
                member: Some(member),
                next_life: 2,
                first_level: FirstLevel::new(policy),
                decision: Decision::default(),
                disk: Disk::new(plan.machines.len()),
                machines: plan.machines,
            });
        }
        Cluster {
            policy,
            nodes,
            membership: Membership::default(),
            heard: BTreeMap::new(),
            post,
            step: 0,
            events: scenario.events(),
            fairness: Fairness::default(),
            outcome: Outcome { courses, ..Outcome::default() },
        }
    }

    fn is_done(&self) -> bool {
        self.nodes.iter().flat_map(|node| &node.machines).all(Machine::is_done)
    }

    fn second(&self) -> u64 {
        self.step / STEPS_OF_PERIOD
    }

    fn step(&mut self) {
        self.deliver();
        if self.step.is_multiple_of(STEPS_OF_PERIOD) {
            self.happen();
        }
        let now_s = self.step as f64 * STEP_S;
        for node in &mut self.nodes {
            self.post.extend(node.work(self.step, now_s));
        }
        self.step += 1;
        if self.step.is_multiple_of(STEPS_OF_PERIOD) {
            self.end_period();
        }
    }

    /// Hands over what was sent in the step before.
    fn deliver(&mut self) {
        let mut requests = Vec::new();
        let mut heard_statistics = false;
        for letter in std::mem::take(&mut self.post) {
            match letter {
                Letter::ToManager(from, message) => {
                    self.heard.insert(from, self.second());
                    heard_statistics |= matches!(message, ToManager::Statistics(_));
                    if let ToManager::GrantAny { pages } = message {
                        requests.push((from, pages));
                    }
                    let sends = self.membership.handle(from, message);
                    self.post_sends(sends);
                }
                Letter::ToNode(to, message) => {
                    if let Some(node) = self.nodes.iter_mut().find(|node| node.id == to) {
                        self.post.extend(node.handle(&message, &mut self.outcome));
                    }
                }
                Letter::Grant(to, blocks) => {
                    self.outcome.pages_moved += blocks.iter().map(|block| block.pages).sum::<u64>();
                    if let Some(node) = self.nodes.iter_mut().find(|node| node.id == to) {
                        self.post.extend(node.receive(&blocks));
                    }
                }
            }
        }
        if heard_statistics {
            self.second_level(&requests);
        }
    }

    fn second_level(&mut self, requests: &[(NodeId, u64)]) {
        let active = self.membership.active();
        let forwards = match self.policy {
            Policy::GreedyLocal => return,
            Policy::GreedyRemote { .. } | Policy::Tlp(_) => {
                let reserve_pages = match self.policy {
                    Policy::Tlp(settings) => settings.reserve_pages,
                    _ => 0,
                };
                let free = active.map(|(node, holdings)| (node, holdings.free_pages));
                let mut tlp = Tlp::new(reserve_pages, free);
                let mut forwards = Vec::new();
                for &(to, pages) in requests {
                    tlp.request(to, pages, &mut forwards);
                }
                forwards
            }
            Policy::Anticipating(settings) => {
                let need = |(node, holdings): (NodeId, &crate::cluster::message::Holdings)| Need {
                    node,
                    home_pages: holdings.home_pages,
                    total_pages: holdings.owned.iter().map(|block| block.pages).sum(),
                    free_pages: holdings.free_pages,
                    wanted_pages: holdings.wanted_pages,
                };
                let needs: Vec<Need> = active.map(need).collect();
                grants::rebalance(&needs, settings.reserve_pages, settings.minimum_pages)
            }
        };
        let sends = self.membership.forward(&forwards);
        self.post_sends(sends);
    }

    fn post_sends(&mut self, sends: Vec<(NodeId, ToNode)>) {
        self.post.extend(sends.into_iter().map(|(to, message)| Letter::ToNode(to, message)));
    }

    fn happen(&mut self) {
        let second = self.second();
        let due: Vec<Event> = self.events.iter().copied().filter(|&(at, _)| at == second).collect();
        for (_, what) in due {
            match what {
                Happening::Leaves(id) => {
                    self.change(id, |member, _, _| Some(member.as_mut()?.leave()))
                }
                Happening::Joins(id) => {
                    self.change(id, |member, _, life| Some(member.as_mut()?.register(life)))
                }
                Happening::Crashes(id) => self.change(id, |member, _, _| {
                    *member = None;
                    None
                }),
                Happening::Returns(id) => self.change(id, |member, home_pages, life| {
                    let (again, out) = Member::start_after_crash(id, life, home_pages);
                    *member = Some(again);
                    Some(out)
                }),
                Happening::ManagerRestarts => self.restart_manager(),
            }
        }
        let is_silent = |(&node, &heard): (&NodeId, &u64)| {
            let is_present =
                matches!(self.membership.state(node), NodeState::Active | NodeState::Leaving);
            (is_present && heard + SILENT_PERIODS < second).then_some(node)
        };
        for node in self.heard.iter().filter_map(is_silent).collect::<Vec<_>>() {
            let sends = self.membership.lost(node);
            self.post_sends(sends);
        }
    }

    /// Something happens to a lender; it is given its memory and a life that it never had.
    fn change(
        &mut self,
        id: NodeId,
        act: impl FnOnce(&mut Option<Member>, u64, u64) -> Option<Vec<Outgoing>>,
    ) {
        let Some(node) = self.nodes.iter_mut().find(|node| node.id == id) else { return };
        debug_assert!(node.machines.is_empty(), "only lenders come and go");
        let life = node.next_life;
        node.next_life += 1;
        let out = act(&mut node.member, node.home_pages, life);
        self.post.extend(letters(id, out.unwrap_or_default()));
    }

    fn restart_manager(&mut self) {
        self.membership = Membership::default();
        self.heard.clear();
        self.post.retain(|letter| matches!(letter, Letter::Grant(..)));
        for node in &mut self.nodes {
            if let Some(member) = &mut node.member {
                self.post.extend(letters(node.id, member.reconnected()));
            }
        }
    }

    fn end_period(&mut self) {
        for node in &mut self.nodes {
            self.post.extend(node.end_period(&mut self.outcome));
        }
        let mut standings = Vec::new();
        let mut courses = self.outcome.courses.iter_mut();
        for (at, node) in self.nodes.iter().enumerate() {
            for machine in &node.machines {
                standings.push(Standing {
                    node: at,
                    need_pages: machine.overflow_pages(),
                    has_pages: machine.live_pages(),
                });
                if let Some(course) = courses.next() {
                    course.samples.push(Sample {
                        used_pages: machine.account.used_pages(),
                        target_pages: machine.account.target_pages(),
                    });
                }
            }
        }
        let home_pages: Vec<u64> = self.nodes.iter().map(Node::present_pages).collect();
        self.fairness.observe(&standings, &home_pages);
        debug_assert!(self.has_one_owner_each(), "a page has two owners");
    }

    /// Whether nobody owns what another one does: of each home in its present life, no more is
    /// owned than there is.
    fn has_one_owner_each(&self) -> bool {
        let holdings: Vec<_> =
            self.nodes.iter().filter_map(|node| Some(node.member.as_ref()?.holdings())).collect();
        self.nodes.iter().all(|node| {
            let Some(member) = &node.member else { return true };
            let home = Home { node: node.id, life: member.life() };
            let owned = holdings.iter().flat_map(|holdings| &holdings.owned);
            let owned: u64 =
                owned.filter(|block| block.home == home).map(|block| block.pages).sum();
            owned <= node.home_pages
        })
    }

    fn end(mut self) -> Outcome {
        for node in &self.nodes {
            for machine in &node.machines {
                self.outcome.disk_reads += machine.disk_reads;
                self.outcome.puts_failed += machine.puts_failed;
                let runs = machine.runs.iter().enumerate().map(|(at, run)| RunTime {
                    node: node.id,
                    machine: machine.name.clone(),
                    iteration: at + 1,
                    seconds: run.took_s,
                });
                self.outcome.runs.extend(runs);
            }
        }
        self.outcome.pages_leaked =
            self.nodes.iter().map(|node| self.membership.lost_pages(node.id)).sum();
        self.outcome.seconds = self.second();
        self.fairness.end(&mut self.outcome);
        self.outcome
    }
}

impl Node {
    /// A step of its machines. Another machine comes first in each step.
    fn work(&mut self, step: u64, now_s: f64) -> Vec<Letter> {
        let Some(member) = &mut self.member else { return Vec::new() };
        let used: u64 = self.machines.iter().map(|machine| machine.account.used_pages()).sum();
        let at_others = used.saturating_sub(member.own_pages());
        let remote = if used > 0 { at_others as f64 / used as f64 } else { 0.0 };
        let mut free_pages = member.free_pages();
        for turn in 0..self.machines.len() {
            let index = (step as usize + turn) % self.machines.len();
            let mut shared =
                Shared { free_pages: &mut free_pages, remote, disk: &mut self.disk, index };
            self.machines[index].step(now_s, STEP_S, &mut shared);
        }
        self.disk.end_step();
        self.tell_used()
    }

    fn tell_used(&mut self) -> Vec<Letter> {
        let used = self.machines.iter().map(|machine| machine.account.used_pages()).sum();
        let Some(member) = &mut self.member else { return Vec::new() };
        letters(self.id, member.set_used(used))
    }

    fn handle(&mut self, message: &ToNode, outcome: &mut Outcome) -> Vec<Letter> {
        let Some(member) = &mut self.member else { return Vec::new() };
        let before = owned_pages(member);
        let out = member.handle(message);
        let mut out = letters(self.id, out);
        if matches!(message, ToNode::Invalidate(_)) {
            // Used pages lie evenly over what is owned.
            let gone = before - owned_pages(member).min(before);
            let used: u64 = self.machines.iter().map(|machine| machine.account.used_pages()).sum();
            let lost = match before {
                0 => 0,
                _ => (u128::from(gone) * u128::from(used) / u128::from(before)) as u64,
            };
            outcome.pages_lost += spill(&mut self.machines, lost);
            out.extend(self.tell_used());
        }
        out
    }

    fn receive(&mut self, blocks: &[Block]) -> Vec<Letter> {
        let Some(member) = &mut self.member else { return Vec::new() };
        letters(self.id, member.receive(blocks))
    }

    fn end_period(&mut self, outcome: &mut Outcome) -> Vec<Letter> {
        let Some(member) = &mut self.member else { return Vec::new() };
        if !matches!(member.phase(), Phase::Active | Phase::Leaving) {
            return Vec::new();
        }
        let consumers: Vec<_> =
            self.machines.iter_mut().map(|machine| machine.account.end_period()).collect();
        let situation = Situation {
            total_pages: member.usable_pages(),
            owed_pages: member.owed_pages(),
            consumers: &consumers,
        };
        self.first_level.decide(&situation, &mut self.decision);
        for (machine, &target) in self.machines.iter_mut().zip(&self.decision.targets) {
            machine.account.set_target(target);
        }
        // Pages that must go for want of room go first.
        let mut spilled = spill(&mut self.machines, member.excess_pages().min(SPILL_PAGES));
        for (machine, &pages) in self.machines.iter_mut().zip(&self.decision.take_back) {
            spilled += machine.spill(pages.min(SPILL_PAGES - spilled));
        }
        outcome.pages_spilled += spilled;
        self.disk.spill(spilled);
        let mut out = self.tell_used();
        let Some(member) = &mut self.member else { return out };
        let holdings = member.end_period(self.decision.wanted_pages);
        out.push(Letter::ToManager(self.id, ToManager::Statistics(holdings)));
        if self.decision.request_pages > 0 && member.phase() == Phase::Active {
            let pages = self.decision.request_pages;
            out.push(Letter::ToManager(self.id, ToManager::GrantAny { pages }));
        }
        out
    }

    /// Pages of its memory that are in the cluster.
    fn present_pages(&self) -> u64 {
        match &self.member {
            Some(member) if member.phase() == Phase::Active => self.home_pages,
            _ => 0,
        }
    }
}

/// Takes pages from all machines, in proportion to what they hold.
fn spill(machines: &mut [Machine], pages: u64) -> u64 {
    let held: u64 = machines.iter().map(|machine| machine.account.used_pages()).sum();
    let mut parts: Vec<u64> = machines.iter().map(|machine| machine.account.used_pages()).collect();
    crate::cluster::targets::share::scale_to_fit(&mut parts, pages.min(held));
    machines.iter_mut().zip(parts).map(|(machine, pages)| machine.spill(pages)).sum()
}

fn owned_pages(member: &Member) -> u64 {
    member.holdings().owned.iter().map(|block| block.pages).sum()
}

fn letters(from: NodeId, out: Vec<Outgoing>) -> Vec<Letter> {
    out.into_iter().map(|out| letter(from, out)).collect()
}

fn letter(from: NodeId, out: Outgoing) -> Letter {
    match out {
        Outgoing::Manager(message) => Letter::ToManager(from, message),
        Outgoing::Grant { to, blocks } => Letter::Grant(to, blocks),
    }
}

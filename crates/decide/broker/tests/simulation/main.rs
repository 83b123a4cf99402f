//! Simulates a host, its virtual machines and their clock from one seed, while everything fails
//! that may. Guests lie, are slow, hang, reboot and die. Monitors say nothing; donors do not get
//! their memory back; VMs come faster than memory is given back. An agent is killed in the middle
//! of any step and starts anew.
//!
//! The promise: no node's memory is given out twice, in the ledger or in fact. A guest that obeys
//! loses nothing without a warning in time. A VM that can be admitted is admitted before long.
//!
//! `HECATON_SEEDS=N` runs so many seeds, `HECATON_SEED=S` runs just one.

mod guest;

use guest::{Guest, Mood};
use hecaton_broker::{
    Action, Broker, Counters, Elastic, EvictWhy, Host, Newcomer, NewcomerKind, NumaNode, Order,
    Settings, Vm, VmId, Waits,
};
use hecaton_memory::SplitMix;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

const BLOCK: u64 = 2 << 20;
const TICK: Duration = Duration::from_millis(500);
const DEFAULT_SEEDS: u64 = 1000;

/// Ticks in which everything goes wrong that may, and in which nothing does any more.
const WILD_TICKS: u64 = 1200;
const CALM_TICKS: u64 = 1200;

/// Longest that a regular VM may wait when nothing outside of the broker delays it: the reclaim
/// time, the warning, and the time of kills and starts. Doubled, because the host's own programs
/// may take the place that was made for it.
const LONGEST_WAIT: Duration = Duration::from_secs(2 * (30 + 30 + 15));

struct Dice(SplitMix);

impl Dice {
    fn below(&mut self, bound: u64) -> u64 {
        self.0.draw() % bound
    }

    /// True in so many of a thousand cases.
    fn permille(&mut self, chance: u64) -> bool {
        self.below(1000) < chance
    }
}

/// A virtual machine of a fixed size.
struct Fixed {
    id: VmId,
    base: Vec<u64>,
    cores: u32,
    /// It takes its memory then.
    starts_at: u64,
}

/// Donors or pools of a node, as they are.
#[derive(Default)]
struct Holder {
    elastic: Elastic,
    on_its_way: Option<(Order, u64, u64)>,
    stuck_until: u64,
}

#[derive(Default, Debug)]
struct Tally {
    counters: Counters,
    restarts: u64,
    deaths: u64,
    reboots: u64,
    replaced: u64,
    recalls: u64,
    moved_to_another_node: u64,
    waited_for_cores: u64,
    longest_wait: Duration,
}

struct World {
    dice: Dice,
    now: u64,
    settings: Settings,
    broker: Broker,
    /// Counters of brokers before.
    before: Counters,
    restarted_at: u64,
    nodes: Vec<(u64, u64)>,
    cores: u32,
    /// Bytes that donors of each node could lend.
    lend_caps: Vec<u64>,
    lent: Vec<Holder>,
    ephemeral: Vec<Holder>,
    fixed: Vec<Fixed>,
    guests: Vec<Guest>,
    waiting: Vec<(Newcomer, u64)>,
    warned: BTreeMap<VmId, u64>,
    evicted: BTreeSet<VmId>,
    next_id: u64,
    is_wild: bool,
    tally: Tally,
}

impl World {
    fn new(seed: u64) -> World {
        let mut dice = Dice(SplitMix::new(seed));
        let count = 1 + dice.below(3) as usize;
        let node = |dice: &mut Dice| ((100 + dice.below(200)) * BLOCK, (2 + dice.below(8)) * BLOCK);
        let nodes: Vec<(u64, u64)> = (0..count).map(|_| node(&mut dice)).collect();
        let settings = Settings {
            buffer_bytes: dice.below(60) * BLOCK,
            even_buffer: dice.below(4) > 0,
            batch_bytes: [None, Some(16 * BLOCK), Some(64 * BLOCK)][dice.below(3) as usize],
            parallel: dice.below(5) > 0,
            least_change_bytes: (1 + dice.below(3)) * BLOCK,
            harvest_quota: 1 + dice.below(5) as usize,
            lend_ahead_bytes: dice.below(10) * BLOCK,
            ephemeral_cap_bytes: dice.below(2) * dice.below(40) * BLOCK,
            ..Settings::default()
        };
        let lends = |dice: &mut Dice| dice.below(2) * dice.below(100) * BLOCK;
        let lend_caps = nodes.iter().map(|_| lends(&mut dice)).collect();
        let mut world = World {
            broker: Broker::new(settings.clone()).expect("sound settings"),
            settings,
            before: Counters::default(),
            now: 0,
            restarted_at: 0,
            lent: nodes.iter().map(|_| Holder::default()).collect(),
            ephemeral: nodes.iter().map(|_| Holder::default()).collect(),
            nodes,
            cores: 4 + dice.below(20) as u32,
            lend_caps,
            fixed: Vec::new(),
            guests: Vec::new(),
            waiting: Vec::new(),
            warned: BTreeMap::new(),
            evicted: BTreeSet::new(),
            next_id: 1,
            is_wild: true,
            tally: Tally::default(),
            dice,
        };
        if world.nodes.len() > 1 && world.dice.below(2) == 0 {
            world.find_misplaced();
        }
        world
    }

    /// A harvest VM that was there before, and whose memory is not where it ought to be.
    fn find_misplaced(&mut self) {
        let id = self.id();
        let count = self.nodes.len();
        let mut base = vec![0; count];
        base[0] = 8 * BLOCK;
        let mut guest = Guest::new(id, base, 1, 100 * BLOCK, 0, &mut self.dice);
        guest.mood = Mood::Good;
        guest.is_to_blame = true;
        let plug = &mut guest.plugs[0];
        (plug.requested, plug.plugged) = (60 * BLOCK, 60 * BLOCK);
        plug.resident[0] = 10 * BLOCK;
        plug.resident[count - 1] = 50 * BLOCK;
        // Its agent has left a record, in case its monitor does not answer at the first look.
        guest.agent_ended(&mut self.dice);
        self.guests.push(guest);
    }

    fn id(&mut self) -> VmId {
        self.next_id += 1;
        VmId(self.next_id)
    }

    fn run(&mut self) {
        for _ in 0..WILD_TICKS {
            self.misfortunes();
            self.tick();
        }
        self.calm_down();
        for _ in 0..CALM_TICKS {
            self.tick();
        }
        self.check_rest();
    }

    fn tick(&mut self) {
        self.now += 1;
        let now = self.now;
        self.end_guests();
        for guest in &mut self.guests {
            guest.tick(now, &mut self.dice);
        }
        for node in 0..self.nodes.len() {
            let (wild, dice) = (self.is_wild, &mut self.dice);
            let moved = self.lent[node].tick(now, wild, 3 * BLOCK, dice);
            self.move_away(node, moved);
            let dice = &mut self.dice;
            self.ephemeral[node].tick(now, wild, u64::MAX, dice);
        }
        self.check_memory();
        let host = self.look();
        let actions = self.broker.step(&host, TICK * now as u32);
        self.check_ledger();
        self.check_waits();
        let for_cores = |(_, _, waits): &(_, _, Waits)| matches!(waits, Waits::ForCores { .. });
        self.tally.waited_for_cores += self.broker.waiting().filter(for_cores).count() as u64;
        for action in actions {
            self.carry_out(action, &host);
        }
        self.check_memory();
    }

    /// Memory that a node's donors recall goes to donors of other nodes with room: for borrowers on
    /// other hosts they are as near.
    fn move_away(&mut self, node: usize, mut bytes: u64) {
        for other in (0..self.nodes.len()).filter(|other| *other != node) {
            let Elastic { limit_bytes, used_bytes, .. } = &mut self.lent[other].elastic;
            let goes = limit_bytes.saturating_sub(*used_bytes).min(bytes);
            *used_bytes += goes;
            bytes -= goes;
            self.tally.moved_to_another_node += u64::from(goes > 0);
        }
    }

    fn look(&mut self) -> Host {
        let node = |n: usize| NumaNode {
            total_bytes: self.nodes[n].0,
            system_bytes: self.nodes[n].1,
            lend_cap_bytes: self.lend_caps[n],
            lent: self.lent[n].elastic,
            ephemeral: self.ephemeral[n].elastic,
        };
        let nodes = (0..self.nodes.len()).map(node).collect();
        let fixed = |vm: &Fixed| Vm {
            id: vm.id,
            base_bytes: vm.base.clone(),
            cores: vm.cores,
            harvest: None,
        };
        let mut vms: Vec<Vm> = self.fixed.iter().map(fixed).collect();
        vms.extend(self.guests.iter_mut().map(|guest| guest.seen(self.now)));
        let waiting = self.waiting.iter().map(|(newcomer, _)| *newcomer).collect();
        Host { nodes, cores: self.cores, vms, waiting }
    }

    fn carry_out(&mut self, action: Action, host: &Host) {
        let arrives = self.now + self.dice.below(3);
        match action {
            Action::Admit { vm, base_bytes } => self.admit(vm, base_bytes, host),
            Action::Refuse { vm, .. } => self.waiting.retain(|(newcomer, _)| newcomer.id != vm),
            Action::Grow { vm, node, requested_bytes, order }
            | Action::Shrink { vm, node, requested_bytes, order, .. } => {
                let guest = self.guests.iter_mut().find(|guest| guest.id == vm).expect("it exists");
                let plug = guest.plugs.iter_mut().find(|plug| plug.node == node).expect("a device");
                assert!(plug.on_its_way.is_none(), "two orders on their way");
                assert!(requested_bytes <= plug.max && requested_bytes % plug.block == 0);
                plug.on_its_way = Some((order, requested_bytes, arrives));
            }
            Action::Lend { node, limit_bytes, order } => {
                let had =
                    self.lent[node].elastic.limit_bytes.max(self.lent[node].elastic.used_bytes);
                assert!(limit_bytes <= self.lend_caps[node].max(had), "more than its donors have");
                self.lent[node].on_its_way = Some((order, limit_bytes, arrives));
            }
            Action::Recall { node, limit_bytes, order } => {
                self.tally.recalls += 1;
                self.lent[node].on_its_way = Some((order, limit_bytes, arrives));
            }
            Action::Ephemeral { node, limit_bytes, order } => {
                self.ephemeral[node].on_its_way = Some((order, limit_bytes, arrives));
            }
            Action::Warn { vm, .. } => {
                self.warned.insert(vm, self.now);
            }
            Action::Spare { vm } => {
                self.warned.remove(&vm).expect("it was warned");
            }
            Action::ShutDown { vm, .. } => {
                assert!(self.warned.contains_key(&vm), "{vm:?} shuts down unwarned");
                let does = self.dice.below(2) == 0;
                let guest = self.guests.iter_mut().find(|guest| guest.id == vm).expect("it exists");
                if does && guest.ends_at.is_none() {
                    guest.ends_at = Some(self.now + 4);
                }
            }
            Action::Evict { vm, why } => self.evict(vm, why),
        }
    }

    fn evict(&mut self, vm: VmId, why: EvictWhy) {
        let guest = self.guests.iter_mut().find(|guest| guest.id == vm).expect("it exists");
        if why == EvictWhy::MinimumNeeded {
            let warned = self.warned.get(&vm).expect("nobody's minimum is taken unwarned");
            let notice = TICK * (self.now - warned) as u32;
            assert!(notice >= self.settings.warning, "warned {notice:?} ahead");
        } else {
            assert!(guest.is_to_blame, "{vm:?} has done as it was asked, and is evicted: {why}");
        }
        self.evicted.insert(vm);
        // A kill may take a moment, or not work at first.
        if guest.ends_at.is_none_or(|at| at > self.now + 2) && self.dice.below(3) > 0 {
            guest.ends_at = Some(self.now + 1 + self.dice.below(2));
        }
    }

    fn admit(&mut self, vm: VmId, base: Vec<u64>, host: &Host) {
        let at = self.waiting.iter().position(|(newcomer, _)| newcomer.id == vm).expect("it waits");
        let (newcomer, since) = self.waiting.remove(at);
        let chunks = newcomer.bytes.next_multiple_of(BLOCK);
        assert_eq!(base.iter().sum::<u64>(), chunks, "{newcomer:?}");
        assert!(newcomer.node.is_none_or(|node| base[node] == chunks));
        if newcomer.kind == NewcomerKind::Harvest {
            let count = self.guests.len();
            assert!(count < self.settings.harvest_quota, "more harvest VMs than may be");
            self.tally.replaced += u64::from(self.evicted.contains(&vm));
            let more = self.dice.below(120) * BLOCK;
            let cores = newcomer.cores;
            let mut guest = Guest::new(vm, base, cores, more, self.now, &mut self.dice);
            if !self.is_wild {
                guest.mood = Mood::Good;
            }
            self.guests.push(guest);
            return;
        }
        if base.iter().filter(|part| **part > 0).count() > 1 {
            self.check_had_to_span(&newcomer, host);
        }
        if newcomer.kind == NewcomerKind::Regular {
            let waited = TICK * (self.now - since) as u32;
            self.tally.longest_wait = self.tally.longest_wait.max(waited);
        }
        let starts_at = self.now + self.dice.below(5);
        self.fixed.push(Fixed { id: vm, base, cores: newcomer.cores, starts_at });
    }

    /// No node could have had it, whoever had given what.
    fn check_had_to_span(&self, newcomer: &Newcomer, host: &Host) {
        for n in 0..self.nodes.len() {
            let of_others: u64 = self.fixed.iter().map(|vm| vm.base[n]).sum();
            let waited_for: u64 = host
                .waiting
                .iter()
                .filter(|other| other.id != newcomer.id && other.kind != NewcomerKind::Harvest)
                .map(|other| other.bytes)
                .sum();
            let left = self.nodes[n].0 - self.nodes[n].1;
            assert!(
                left < of_others + waited_for + newcomer.bytes,
                "{newcomer:?} spans nodes, and node {n} could have had it"
            );
        }
    }

    fn end_guests(&mut self) {
        let now = self.now;
        let (ended, rest): (Vec<Guest>, Vec<Guest>) =
            self.guests.drain(..).partition(|guest| guest.ends_at.is_some_and(|at| now >= at));
        self.guests = rest;
        for guest in ended {
            self.warned.remove(&guest.id);
            // Most are wanted back.
            if self.dice.below(4) > 0 {
                let bytes = guest.base.iter().sum();
                let kind = NewcomerKind::Harvest;
                let cores = guest.cores;
                let newcomer = Newcomer { id: guest.id, kind, bytes, cores, node: None };
                self.waiting.push((newcomer, now));
            }
        }
    }

    fn misfortunes(&mut self) {
        let now = self.now;
        if self.dice.permille(25) && self.waiting.len() < 20 {
            let kinds = [NewcomerKind::Regular, NewcomerKind::Spot, NewcomerKind::Harvest];
            let kind = kinds[[0, 0, 0, 1, 2][self.dice.below(5) as usize]];
            let id = self.id();
            let most = if kind == NewcomerKind::Harvest { 30 } else { 100 };
            let bytes = (1 + self.dice.below(most)) * BLOCK - self.dice.below(2) * 4096;
            let node = self.dice.below(4 * self.nodes.len() as u64) as usize;
            let node = Some(node).filter(|node| *node < self.nodes.len());
            let cores = (self.dice.below(2) * self.dice.below(9)) as u32;
            self.waiting.push((Newcomer { id, kind, bytes, cores, node }, now));
        }
        if self.dice.permille(25) && !self.fixed.is_empty() {
            let at = self.dice.below(self.fixed.len() as u64) as usize;
            self.fixed.remove(at);
        }
        if self.dice.permille(4) && !self.waiting.is_empty() {
            let at = self.dice.below(self.waiting.len() as u64) as usize;
            self.waiting.remove(at);
        }
        for guest in &mut self.guests {
            if self.dice.permille(3) {
                guest.turn(&mut self.dice);
            }
            if self.dice.permille(3) {
                guest.mood = Mood::Good;
            }
            if self.dice.permille(2) {
                guest.deaf_until = now + self.dice.below(100);
                guest.is_to_blame = true;
            }
            if self.dice.permille(2) {
                // It gives nothing while it boots, which is as bad as a guest that hangs.
                guest.reboot(now);
                guest.is_to_blame = true;
                self.tally.reboots += 1;
            }
            if self.dice.permille(1) {
                guest.ends_at = Some(now);
                self.tally.deaths += 1;
            }
        }
        for holder in &mut self.lent {
            if self.dice.permille(3) {
                holder.stuck_until = now + self.dice.below(200);
            }
        }
        if self.dice.permille(10) {
            self.kill_agent();
        }
        if self.dice.permille(10) {
            // The host's own programs come and go.
            let n = self.dice.below(self.nodes.len() as u64) as usize;
            let ledger = self.broker.ledger().nodes.get(n).copied().unwrap_or_default();
            let more = ledger.buffer_bytes + ledger.unassigned_bytes;
            let system = &mut self.nodes[n].1;
            *system = match self.dice.below(2) {
                0 => *system - system.saturating_sub(BLOCK).min(5 * BLOCK),
                _ => *system + more.min(5 * BLOCK),
            };
        }
    }

    fn kill_agent(&mut self) {
        self.tally.restarts += 1;
        self.restarted_at = self.now;
        self.gather();
        self.broker = Broker::new(self.settings.clone()).expect("sound settings");
        self.warned.clear();
        for guest in &mut self.guests {
            guest.agent_ended(&mut self.dice);
        }
        for holder in self.lent.iter_mut().chain(&mut self.ephemeral) {
            holder.elastic.done = Order(0);
            if let Some((_, bytes, _)) = holder.on_its_way.take()
                && self.dice.below(2) == 0
            {
                holder.elastic.limit_bytes = bytes;
            }
        }
    }

    fn gather(&mut self) {
        let last = *self.broker.counters();
        add(&mut self.before, &last);
    }

    fn calm_down(&mut self) {
        self.is_wild = false;
        for guest in &mut self.guests {
            guest.deaf_until = 0;
            // The reboot gives back all that a bad guest has kept or scattered.
            guest.mood = Mood::Good;
            guest.reboot(self.now);
        }
        for holder in &mut self.lent {
            holder.stuck_until = 0;
        }
    }

    /// Memory and cores in real use fit into the host's.
    fn check_memory(&self) {
        for (n, (total, system)) in self.nodes.iter().enumerate() {
            let fixed = self.fixed.iter().filter(|vm| self.now >= vm.starts_at);
            let sum = system
                + fixed.map(|vm| vm.base[n]).sum::<u64>()
                + self.guests.iter().map(|guest| guest.resident(n)).sum::<u64>()
                + self.lent[n].elastic.used_bytes
                + self.ephemeral[n].elastic.used_bytes;
            assert!(sum <= *total, "node {n} has {} blocks too few", (sum - total) / BLOCK);
        }
        let cores = self.fixed.iter().map(|vm| vm.cores);
        let cores: u32 = cores.chain(self.guests.iter().map(|guest| guest.cores)).sum();
        assert!(cores <= self.cores, "machines have {cores} of {} cores", self.cores);
    }

    fn check_ledger(&self) {
        for (n, node) in self.broker.ledger().nodes.iter().enumerate() {
            assert_eq!(node.sum_bytes(), node.total_bytes + node.overdrawn_bytes);
            assert_eq!(node.overdrawn_bytes, 0, "node {n} is promised twice: {node:?}");
        }
        let cores = self.broker.ledger().cores;
        assert_eq!((cores.sum(), cores.overdrawn), (u64::from(self.cores), 0), "{cores:?}");
    }

    fn check_waits(&self) {
        let stuck = self.lent.iter().map(|holder| holder.stuck_until.min(self.now)).max();
        for (newcomer, since) in &self.waiting {
            let from = (*since).max(self.restarted_at).max(stuck.unwrap_or(0));
            let waited = TICK * (self.now - from) as u32;
            let factor = match newcomer.kind {
                NewcomerKind::Regular => 1,
                NewcomerKind::Spot => 4,
                NewcomerKind::Harvest => continue,
            };
            assert!(
                waited <= LONGEST_WAIT * factor,
                "{newcomer:?} waits for {waited:?}; {:#?}\n{:#?}\n{:#?}",
                self.broker.waiting().collect::<Vec<_>>(),
                self.broker.ledger(),
                self.guests
            );
        }
    }

    /// With nothing going wrong any more all is as it should be.
    fn check_rest(&mut self) {
        let host = self.look();
        let actions = self.broker.step(&host, TICK * self.now as u32);
        assert_eq!(actions, [], "no rest");
        for (newcomer, _) in &self.waiting {
            assert_eq!(newcomer.kind, NewcomerKind::Harvest, "{newcomer:?} is never served");
        }
        let nodes = self.nodes.len() as u64;
        let part = self.settings.buffer_bytes / BLOCK / nodes * BLOCK;
        for (n, node) in self.broker.ledger().nodes.iter().enumerate() {
            let gives = node.harvested_bytes + node.ephemeral_bytes;
            let slack = self.settings.least_change_bytes * (2 + self.guests.len() as u64);
            if self.settings.even_buffer && gives > slack {
                assert!(node.buffer_bytes + slack >= part, "node {n}'s buffer: {node:?}");
            }
        }
        self.gather();
        self.tally.counters = self.before;
    }
}

impl Holder {
    /// Bytes that were brought back.
    fn tick(&mut self, now: u64, is_wild: bool, rate: u64, dice: &mut Dice) -> u64 {
        if let Some((order, bytes, _)) = self.on_its_way.filter(|(.., at)| now >= *at) {
            self.elastic.limit_bytes = bytes;
            self.elastic.done = order;
            self.on_its_way = None;
        }
        let Elastic { limit_bytes, used_bytes, .. } = &mut self.elastic;
        if *used_bytes > *limit_bytes {
            if now >= self.stuck_until {
                let back = rate.min(*used_bytes - *limit_bytes);
                *used_bytes -= back;
                return back;
            }
        } else if is_wild {
            match dice.below(20) {
                0 => *used_bytes -= *used_bytes / 2 / BLOCK * BLOCK,
                1 => *used_bytes += (*limit_bytes - *used_bytes) / 2 / BLOCK * BLOCK,
                _ => {}
            }
        }
        0
    }
}

fn run_seed(seed: u64) -> Tally {
    let mut world = World::new(seed);
    world.run();
    world.tally
}

#[test]
fn nothing_is_given_twice_and_all_are_served() {
    let number = |name| std::env::var(name).ok().map(|text: String| text.parse::<u64>());
    let number = |name| number(name).transpose().unwrap_or_else(|e| panic!("{name}: {e}"));
    if let Some(seed) = number("HECATON_SEED") {
        println!("seed {seed}: {:?}", run_seed(seed));
        return;
    }
    let seeds = number("HECATON_SEEDS").unwrap_or(DEFAULT_SEEDS);
    let mut sum = Tally::default();
    for seed in 0..seeds {
        let Ok(tally) = std::panic::catch_unwind(|| run_seed(seed)) else {
            panic!(
                "seed {seed} fails: HECATON_SEED={seed} cargo test --release -p hecaton-broker \
                 --test simulation"
            );
        };
        add(&mut sum.counters, &tally.counters);
        sum.restarts += tally.restarts;
        sum.deaths += tally.deaths;
        sum.reboots += tally.reboots;
        sum.replaced += tally.replaced;
        sum.recalls += tally.recalls;
        sum.moved_to_another_node += tally.moved_to_another_node;
        sum.waited_for_cores += tally.waited_for_cores;
        sum.longest_wait = sum.longest_wait.max(tally.longest_wait);
    }
    println!("{seeds} seeds: {sum:?}");
    if seeds >= DEFAULT_SEEDS {
        // A simulation in which nothing goes wrong shows nothing.
        let Counters { spanning, refused, regular_that_waited, warned, spared, .. } = sum.counters;
        let reached = [spanning, refused, regular_that_waited, warned, spared];
        let others = [sum.restarts, sum.deaths, sum.reboots, sum.replaced, sum.recalls];
        let others = others.into_iter().chain([sum.moved_to_another_node, sum.waited_for_cores]);
        for reached in reached.into_iter().chain(others).chain(sum.counters.evicted) {
            assert!(reached > 0, "the seeds do not reach everything: {sum:?}");
        }
    }
}

fn add(sum: &mut Counters, one: &Counters) {
    sum.admitted += one.admitted;
    sum.spanning += one.spanning;
    sum.refused += one.refused;
    sum.regular_that_waited += one.regular_that_waited;
    sum.regular_waited += one.regular_waited;
    sum.warned += one.warned;
    sum.spared += one.spared;
    for (sum, one) in sum.evicted.iter_mut().zip(one.evicted) {
        *sum += one;
    }
}

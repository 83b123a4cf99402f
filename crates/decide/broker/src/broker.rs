//! Turns one snapshot of the host into the actions of this step.

use crate::accounts::books::{Books, Key, Orders};
use crate::accounts::ledger::Ledger;
use crate::action::{Action, EvictWhy};
use crate::admission::{Admission, Needs, Urgent, Waiting};
use crate::eviction::{self, Candidate};
use crate::host::{Device, Host, NodeNo, Order, Vm, VmId};
use crate::overdue::{Debt, Debts};
use crate::settings::{Settings, SettingsError};
use crate::targets::{Targets, targets};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::time::Duration;

/// Most evictions that are remembered, to keep those machines away for a while.
const MAX_EVICTED: usize = 1024;

/// Decides who has which part of a host's memory, and how many of its cores.
#[derive(Clone, Debug)]
pub struct Broker {
    settings: Settings,
    orders: Orders,
    debts: Debts,
    waiting: BTreeMap<VmId, Waiting>,
    dooms: BTreeMap<VmId, Doom>,
    evicted_at: BTreeMap<VmId, Duration>,
    ledger: Ledger,
    counters: Counters,
}

/// Reason why a VM waits.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(tag = "waits", rename_all = "kebab-case")]
pub enum Waits {
    /// Others give back what it is to have.
    ForMemory {
        /// Bytes that are not free yet.
        missing_bytes: u64,
    },
    /// There is memory, and too few cores. A regular VM gets minimum cores of evicted harvest VMs;
    /// a harvest VM waits until a VM leaves.
    ForCores {
        /// How many are not free yet.
        missing_cores: u64,
    },
    /// There is no room, and nobody is evicted for a harvest VM.
    ForRoom,
    /// There is room, and there are as many harvest VMs as there may be.
    ForQuota,
    /// It was evicted a short while ago.
    AfterEviction,
}

/// Counts of events since this broker began.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Counters {
    /// Newcomers that could be started.
    pub admitted: u64,
    /// Admitted regular and spot VMs on more than one NUMA node.
    pub spanning: u64,
    /// Newcomers that could not be had.
    pub refused: u64,
    /// Regular VMs that were not admitted at once.
    pub regular_that_waited: u64,
    /// How long they waited, all together.
    pub regular_waited: Duration,
    /// Harvest VMs that were told that their minimum is needed.
    pub warned: u64,
    /// Warned harvest VMs that were told that their minimum is not needed.
    pub spared: u64,
    /// Harvest VMs that were killed, in the order of [`EvictWhy::ALL`].
    pub evicted: [u64; 5],
}

/// A harvest VM that is to go.
#[derive(Clone, Copy, Debug)]
struct Doom {
    deadline: Duration,
    stage: Stage,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    Warned,
    ShuttingDown,
    Killed(EvictWhy),
}

impl Broker {
    /// One that knows nothing yet: at an agent's start, whatever was before.
    pub fn new(settings: Settings) -> Result<Broker, SettingsError> {
        settings.check()?;
        Ok(Broker {
            settings,
            orders: Orders::default(),
            debts: Debts::default(),
            waiting: BTreeMap::new(),
            dooms: BTreeMap::new(),
            evicted_at: BTreeMap::new(),
            ledger: Ledger::default(),
            counters: Counters::default(),
        })
    }

    /// Sets [`Settings::harvest_quota`], which may be another one at each step.
    pub fn set_harvest_quota(&mut self, most: usize) {
        self.settings.harvest_quota = most;
    }

    /// Owner of every byte after the last step, the step's orders included.
    pub fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// Counts of events since this broker began.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Waiting VMs: since when, and why.
    pub fn waiting(&self) -> impl Iterator<Item = (VmId, Duration, Waits)> {
        self.waiting.iter().map(|(id, waiting)| (*id, waiting.since, waiting.state))
    }

    /// Harvest VMs that must go, and their deadlines.
    pub fn warned(&self) -> impl Iterator<Item = (VmId, Duration)> {
        self.dooms.iter().map(|(id, doom)| (*id, doom.deadline))
    }

    /// Turns a snapshot of the host into actions. `now` never goes back. Actions of the last step
    /// that were not carried out are repeated.
    pub fn step(&mut self, host: &Host, now: Duration) -> Vec<Action> {
        let mut actions = Vec::new();
        self.forget(host, now);
        let mut books = Books::open(host, &self.orders);
        let capacity: Vec<u64> = (0..books.nodes()).map(|n| books.capacity(n)).collect();
        let buffer = self.settings.buffer_parts(&capacity);
        let needs = Admission {
            settings: &self.settings,
            host,
            buffer: &buffer,
            books: &mut books,
            waiting: &mut self.waiting,
            evicted_at: &self.evicted_at,
            counters: &mut self.counters,
            actions: &mut actions,
            now,
        }
        .run();
        self.debts.pass(now);
        self.warn(host, &books, &needs, now, &mut actions);
        let targets = targets(
            &self.settings,
            host,
            &books,
            &needs,
            &buffer,
            |vm| self.dooms.contains_key(&vm),
            |key| self.debts.is_stuck(key, self.settings.patience, now),
        );
        self.note_debts(host, &targets, now);
        self.evict_the_overdue(host, &books, &needs, &targets, now, &mut actions);
        for (vm, doom) in &self.dooms {
            if let Stage::Killed(why) = doom.stage {
                actions.push(Action::Evict { vm: *vm, why });
            }
        }
        self.order(host, &mut books, &needs, &targets, &buffer, now, &mut actions);
        // Once more: whoever was asked just now owes from now on.
        self.note_debts(host, &targets, now);
        self.ledger = Ledger::close(&books, &needs, &buffer);
        actions
    }

    /// Drops what is known of those that are gone.
    fn forget(&mut self, host: &Host, now: Duration) {
        let exists = |vm: VmId| host.vms.iter().any(|other| other.id == vm);
        self.orders.settle(host);
        self.dooms.retain(|vm, _| exists(*vm));
        self.debts.retain(|key| match key {
            Key::Device(vm, _) => exists(*vm),
            Key::Lent(_) | Key::Ephemeral(_) => true,
        });
        let replace_after = self.settings.replace_after;
        self.evicted_at.retain(|_, at| now < *at + replace_after);
    }

    /// Warns harvest VMs whose minimum is needed, lifts warnings, and kills VMs at their deadlines.
    fn warn(
        &mut self,
        host: &Host,
        books: &Books,
        needs: &Needs,
        now: Duration,
        actions: &mut Vec<Action>,
    ) {
        let mut missing: Vec<u64> = (0..books.nodes())
            .map(|n| {
                let is_stuck = self.debts.is_stuck(Key::Lent(n), self.settings.reclaim_time, now);
                let lent = if is_stuck { books.lent_used[n] } else { 0 };
                let wanted = needs.urgent[n].saturating_add(books.minimum[n]).saturating_add(lent);
                // Nobody goes for what the host's own programs have taken.
                wanted.saturating_sub(books.reach(n)).min(needs.urgent[n])
            })
            .collect();
        let cores = needs.urgent_cores.saturating_add(books.cores.minimum);
        missing.push(cores.saturating_sub(books.cores.reach()).min(needs.urgent_cores));
        let candidates: Vec<Candidate> = host
            .vms
            .iter()
            .filter(|vm| vm.harvest.is_some())
            .map(|vm| {
                let stage = self.dooms.get(&vm.id).map(|doom| doom.stage);
                let base = |n: usize| vm.base_bytes.get(n).copied().unwrap_or(0);
                let mut gives: Vec<u64> = (0..books.nodes()).map(base).collect();
                gives.push(u64::from(vm.cores));
                Candidate {
                    vm: vm.id,
                    gives,
                    is_going: stage.is_some_and(|stage| stage != Stage::Warned),
                    is_warned: stage == Some(Stage::Warned),
                }
            })
            .collect();
        let victims = eviction::victims(&missing, &candidates);
        for vm in candidates.iter().filter(|c| c.is_warned).map(|candidate| candidate.vm) {
            if !victims.contains(&vm) {
                self.dooms.remove(&vm);
                self.counters.spared += 1;
                actions.push(Action::Spare { vm });
            }
        }
        for vm in victims {
            let deadline = now + self.settings.warning;
            let doom = self.dooms.entry(vm).or_insert_with(|| {
                self.counters.warned += 1;
                actions.push(Action::Warn { vm, deadline });
                Doom { deadline, stage: Stage::Warned }
            });
            if doom.stage == Stage::Warned && now + self.settings.shut_down >= doom.deadline {
                doom.stage = Stage::ShuttingDown;
                actions.push(Action::ShutDown { vm, deadline: doom.deadline });
            }
            if doom.stage == Stage::ShuttingDown && now >= doom.deadline {
                self.kill(vm, EvictWhy::MinimumNeeded, now);
            }
        }
    }

    fn kill(&mut self, vm: VmId, why: EvictWhy, now: Duration) {
        self.dooms.insert(vm, Doom { deadline: now, stage: Stage::Killed(why) });
        if self.evicted_at.len() < MAX_EVICTED {
            self.evicted_at.insert(vm, now);
        }
        if let Some(at) = EvictWhy::ALL.iter().position(|other| *other == why) {
            self.counters.evicted[at] += 1;
        }
    }

    fn is_killed(&self, vm: VmId) -> bool {
        self.dooms.get(&vm).is_some_and(|doom| matches!(doom.stage, Stage::Killed(_)))
    }

    fn ordered(&self, vm: VmId, node: NodeNo) -> u64 {
        self.orders.under_way(Key::Device(vm, node)).unwrap_or(0)
    }

    /// Since when whoever was asked has given nothing.
    fn note_debts(&mut self, host: &Host, targets: &Targets, now: Duration) {
        for vm in &host.vms {
            for device in vm.devices().iter().filter(|device| device.node < host.nodes.len()) {
                let key = Key::Device(vm.id, device.node);
                let ordered = self.ordered(vm.id, device.node);
                let nodes = 0..host.nodes.len();
                let charge = nodes.clone().map(|n| device.charge(n, ordered)).sum();
                let owes = nodes.map(|n| targets.owed(vm, device, n, ordered)).sum();
                let held: u64 = device.held_bytes.iter().sum();
                let is_told = device.requested_bytes < held.max(device.plugged_bytes);
                let under_way = self.orders.under_way(key);
                let is_being_told = under_way.is_some_and(|size| size < device.requested_bytes);
                let is_in_pieces = device.scattered_bytes > 0;
                let asked = is_told || is_being_told || is_in_pieces || !device.is_heard;
                self.debts.note(key, charge, owes, asked, now);
            }
        }
        for (n, node) in host.nodes.iter().enumerate() {
            let used = node.lent.used_bytes;
            let owes = used.saturating_sub(targets.lent[n]);
            self.debts.note(Key::Lent(n), used, owes, node.lent.limit_bytes < used, now);
        }
    }

    /// Kills harvest VMs that keep a newcomer waiting for too long, as few as it takes.
    fn evict_the_overdue(
        &mut self,
        host: &Host,
        books: &Books,
        needs: &Needs,
        targets: &Targets,
        now: Duration,
        actions: &mut Vec<Action>,
    ) {
        for n in 0..books.nodes() {
            let missing = needs.urgent[n].saturating_sub(books.free(n));
            if missing == 0 {
                continue;
            }
            let who: Vec<&Urgent> = needs.who.iter().filter(|who| who.parts[n] > 0).collect();
            // Bytes that come without a kill.
            let lent = books.lent_used[n].saturating_add(books.lent_free[n]);
            let is_stuck = self.debts.is_stuck(Key::Lent(n), self.settings.reclaim_time, now);
            let lent_stays = if is_stuck { books.lent_used[n] } else { 0 };
            let mut coming = lent
                .saturating_sub(targets.lent[n].max(lent_stays))
                .saturating_add(books.ephemeral[n].saturating_sub(targets.ephemeral[n]));
            let mut overdue: Vec<(u64, &Vm, EvictWhy)> = Vec::new();
            for vm in &host.vms {
                if self.is_killed(vm.id) {
                    coming = coming.saturating_add(self.all_of(vm, n));
                    continue;
                }
                for device in vm.devices() {
                    let ordered = self.ordered(vm.id, device.node);
                    let owed = targets.owed(vm, device, n, ordered);
                    let debt = self.debts.get(Key::Device(vm.id, device.node));
                    let why = debt.and_then(|debt| self.why_overdue(debt, device, n, &who, now));
                    match why {
                        Some(why) if owed > 0 => overdue.push((owed, vm, why)),
                        _ => coming = coming.saturating_add(owed),
                    }
                }
            }
            overdue.sort_by_key(|(owed, vm, _)| (u64::MAX - owed, vm.id));
            for (_, vm, why) in overdue {
                if coming >= missing {
                    break;
                }
                if self.is_killed(vm.id) {
                    continue;
                }
                coming = coming.saturating_add(self.all_of(vm, n));
                // It cannot be spared any more, and need not be told.
                actions.retain(
                    |action| !matches!(action, Action::Warn { vm: warned, .. } if *warned == vm.id),
                );
                self.kill(vm.id, why, now);
            }
        }
    }

    /// All that a harvest VM has on a node.
    fn all_of(&self, vm: &Vm, node: NodeNo) -> u64 {
        let base = vm.base_bytes.get(node).copied().unwrap_or(0);
        let charge = |device: &Device| device.charge(node, self.ordered(vm.id, device.node));
        vm.devices().iter().map(charge).fold(base, u64::saturating_add)
    }

    fn why_overdue(
        &self,
        debt: &Debt,
        device: &Device,
        node: NodeNo,
        who: &[&Urgent],
        now: Duration,
    ) -> Option<EvictWhy> {
        let factor = |who: &Urgent| if who.is_spot { self.settings.spot_factor } else { 1 };
        let is_silent =
            |who: &&&Urgent| debt.silent(who.since, now) >= self.settings.patience * factor(who);
        let is_slow = |who: &&&Urgent| {
            debt.taking(who.since, now) >= self.settings.reclaim_time * factor(who)
        };
        if who.iter().any(|who| is_silent(&who)) {
            let has_complied = device.plugged_bytes <= device.requested_bytes;
            return Some(if device.node != node {
                EvictWhy::WrongNode
            } else if has_complied && device.scattered_bytes > 0 {
                EvictWhy::NotContiguous
            } else {
                EvictWhy::NotEnough
            });
        }
        who.iter().any(|who| is_slow(&who)).then_some(EvictWhy::TooSlow)
    }

    /// Gives the orders that lead to the targets, and writes them into the books.
    #[expect(clippy::too_many_arguments, reason = "all that a step has found out")]
    fn order(
        &mut self,
        host: &Host,
        books: &mut Books,
        needs: &Needs,
        targets: &Targets,
        buffer: &[u64],
        now: Duration,
        actions: &mut Vec<Action>,
    ) {
        let mut spare: Vec<u64> = (0..books.nodes())
            .map(|n| books.free(n).saturating_sub(needs.of(n).saturating_add(buffer[n])))
            .collect();
        for (n, node) in host.nodes.iter().enumerate() {
            let (lent, target) = (node.lent, targets.lent[n]);
            if let Some((limit_bytes, order)) = self.limit(
                Key::Lent(n),
                lent.limit_bytes,
                lent.used_bytes,
                target,
                n,
                needs,
                &mut spare,
            ) {
                let used = lent.used_bytes;
                books.lent_free[n] = lent.limit_bytes.max(limit_bytes).saturating_sub(used);
                actions.push(match limit_bytes < used {
                    true => Action::Recall { node: n, limit_bytes, order },
                    false => Action::Lend { node: n, limit_bytes, order },
                });
            }
            let (ephemeral, target) = (node.ephemeral, targets.ephemeral[n]);
            if let Some((limit_bytes, order)) = self.limit(
                Key::Ephemeral(n),
                ephemeral.limit_bytes,
                ephemeral.used_bytes,
                target,
                n,
                needs,
                &mut spare,
            ) {
                books.ephemeral[n] =
                    limit_bytes.max(ephemeral.limit_bytes).max(ephemeral.used_bytes);
                actions.push(Action::Ephemeral { node: n, limit_bytes, order });
            }
        }
        let is_shrinking = |vm: &Vm, device: &Device| {
            let key = Key::Device(vm.id, device.node);
            let ordered = self.orders.under_way(key);
            // Nobody's turn is later for one that hangs.
            !self.debts.is_stuck(key, self.settings.patience, now)
                && (device.plugged_bytes > device.requested_bytes
                    || ordered.is_some_and(|bytes| bytes < device.requested_bytes))
        };
        let mut under_way: usize = host
            .vms
            .iter()
            .map(|vm| vm.devices().iter().filter(|device| is_shrinking(vm, device)).count())
            .sum();
        for vm in &host.vms {
            // While a VM moves memory between nodes, its maximum is that of both nodes together.
            let has = |device: &Device| {
                let ordered = self.ordered(vm.id, device.node);
                device.requested_bytes.max(device.plugged_bytes).max(ordered)
            };
            let all: u64 = vm.devices().iter().map(has).fold(vm.base_total(), u64::saturating_add);
            let most = vm.harvest.as_ref().map_or(0, |harvest| harvest.max_bytes);
            let mut room = most.saturating_sub(all);
            for device in vm.devices().iter().filter(|device| device.node < host.nodes.len()) {
                let node = device.node;
                let key = Key::Device(vm.id, node);
                let is_busy = self.orders.under_way(key).is_some();
                if self.is_killed(vm.id) || is_busy || !device.is_heard {
                    continue;
                }
                let target = targets.devices.get(&(vm.id, node)).copied().unwrap_or(0);
                let is_waited_for = needs.of(node) > 0 || self.dooms.contains_key(&vm.id);
                if target < device.requested_bytes {
                    let least = if is_waited_for { 0 } else { self.settings.least_change_bytes };
                    let may = self.settings.parallel || under_way == 0;
                    let Some(bytes) = self.next_batch(device, target).filter(|_| may) else {
                        continue;
                    };
                    if device.requested_bytes - target < least {
                        continue;
                    }
                    under_way += usize::from(bytes < device.plugged_bytes);
                    actions.push(Action::Shrink {
                        vm: vm.id,
                        node,
                        requested_bytes: bytes,
                        target_bytes: target,
                        order: self.orders.give(key, bytes),
                    });
                } else if let Some((bytes, more)) =
                    self.next_growth(device, target, spare[node].min(room))
                {
                    spare[node] -= more;
                    room -= more;
                    books.harvested[node] += more;
                    actions.push(Action::Grow {
                        vm: vm.id,
                        node,
                        requested_bytes: bytes,
                        order: self.orders.give(key, bytes),
                    });
                }
            }
        }
    }

    /// The next limit of donors or pools, if it is to change.
    #[expect(clippy::too_many_arguments, reason = "two callers, who differ in each of them")]
    fn limit(
        &mut self,
        key: Key,
        limit: u64,
        used: u64,
        target: u64,
        node: NodeNo,
        needs: &Needs,
        spare: &mut [u64],
    ) -> Option<(u64, Order)> {
        if self.orders.under_way(key).is_some() {
            return None;
        }
        let least = self.settings.least_change_bytes;
        if target < limit {
            let is_worth_it = needs.of(node) > 0 || limit - target >= least;
            return is_worth_it.then(|| (target, self.orders.give(key, target)));
        }
        let has = limit.max(used);
        let chunk = self.settings.chunk_bytes;
        let next = target.min(has.saturating_add(spare[node]) / chunk * chunk);
        let is_worth_it = next > limit && (next <= has || next - has >= least);
        if !is_worth_it {
            return None;
        }
        spare[node] -= next.saturating_sub(has);
        Some((next, self.orders.give(key, next)))
    }

    /// The next size on the way down to the target; none while a batch is under way.
    fn next_batch(&self, device: &Device, target: u64) -> Option<u64> {
        let block = device.block_bytes.max(1);
        let next = match self.settings.batch_bytes {
            None => target,
            Some(_) if device.plugged_bytes > device.requested_bytes => return None,
            Some(batch) => {
                let batch = (batch / block * block).max(block);
                let after = device.plugged_bytes.saturating_sub(batch);
                target.max(after.next_multiple_of(block))
            }
        };
        (next < device.requested_bytes).then_some(next)
    }

    /// The next size on the way up to the target, and the spare memory that it takes; none while
    /// the device shrinks. To take a shrink order back would lose the memory that the guest has
    /// already given in pieces that are too small to use.
    fn next_growth(&self, device: &Device, target: u64, spare: u64) -> Option<(u64, u64)> {
        let has = device.requested_bytes;
        if device.plugged_bytes > has {
            return None;
        }
        let block = device.block_bytes.max(1);
        let next = target.min(has.saturating_add(spare) / block * block);
        let more = next.saturating_sub(has);
        (more > 0 && more >= self.settings.least_change_bytes).then_some((next, more))
    }
}

//! Admits waiting VMs that fit now, and reserves memory and cores for those that do not.

use crate::accounts::books::Books;
use crate::action::{Action, RefuseWhy};
use crate::broker::{Counters, Waits};
use crate::host::{Host, Newcomer, NewcomerKind, VmId};
use crate::placement::{self, Layers};
use crate::settings::Settings;
use std::collections::BTreeMap;
use std::time::Duration;

/// The most VMs that may wait at the same time.
pub(crate) const MAX_WAITING: usize = 256;

/// A waiting VM.
#[derive(Clone, Debug)]
pub(crate) struct Waiting {
    pub(crate) since: Duration,
    /// Bytes reserved on each node; `None` while nothing is reserved.
    pub(crate) parts: Option<Vec<u64>>,
    pub(crate) state: Waits,
}

/// Memory of each node, and cores, that are reserved for waiting VMs.
#[derive(Clone, Debug)]
pub(crate) struct Needs {
    /// Bytes for regular and spot VMs: harvest VMs may be evicted for them.
    pub(crate) urgent: Vec<u64>,
    /// Bytes for the minima of harvest VMs: no VM is evicted for them.
    pub(crate) other: Vec<u64>,
    /// Cores for regular and spot VMs: harvest VMs may be evicted for them.
    pub(crate) urgent_cores: u64,
    /// Cores for harvest VMs: these cores are free, and the memory is not free yet.
    pub(crate) other_cores: u64,
    /// Regular and spot VMs that wait for memory.
    pub(crate) who: Vec<Urgent>,
}

/// A regular or spot VM that waits for memory: harvest VMs may be evicted for it.
#[derive(Clone, Debug)]
pub(crate) struct Urgent {
    pub(crate) since: Duration,
    pub(crate) is_spot: bool,
    pub(crate) parts: Vec<u64>,
}

impl Needs {
    /// All bytes reserved on a node.
    pub(crate) fn of(&self, node: usize) -> u64 {
        self.urgent[node].saturating_add(self.other[node])
    }

    /// All reserved cores.
    pub(crate) fn cores(&self) -> u64 {
        self.urgent_cores + self.other_cores
    }
}

/// Decides on all waiting VMs: regular first, then spot, then harvest, each kind in order of
/// arrival. Writes admitted VMs into the books.
pub(crate) struct Admission<'a> {
    pub(crate) settings: &'a Settings,
    pub(crate) host: &'a Host,
    pub(crate) buffer: &'a [u64],
    pub(crate) books: &'a mut Books,
    pub(crate) waiting: &'a mut BTreeMap<VmId, Waiting>,
    pub(crate) evicted_at: &'a BTreeMap<VmId, Duration>,
    pub(crate) counters: &'a mut Counters,
    pub(crate) actions: &'a mut Vec<Action>,
    pub(crate) now: Duration,
}

impl Admission<'_> {
    pub(crate) fn run(mut self) -> Needs {
        let nodes = self.books.nodes();
        let mut needs = Needs {
            urgent: vec![0; nodes],
            other: vec![0; nodes],
            urgent_cores: 0,
            other_cores: 0,
            who: Vec::new(),
        };
        let exists = |id: VmId| self.host.vms.iter().any(|vm| vm.id == id);
        let mut newcomers: Vec<&Newcomer> =
            self.host.waiting.iter().filter(|newcomer| !exists(newcomer.id)).collect();
        newcomers.sort_by_key(|newcomer| newcomer.kind);
        self.waiting.retain(|id, _| newcomers.iter().any(|newcomer| newcomer.id == *id));
        let mut harvest_vms = self.host.vms.iter().filter(|vm| vm.harvest.is_some()).count();
        for newcomer in newcomers {
            if let Some(why) = self.impossible(newcomer) {
                self.refuse(newcomer, why);
                continue;
            }
            let waiting = self.waiting.entry(newcomer.id).or_insert(Waiting {
                since: self.now,
                parts: None,
                state: Waits::ForRoom,
            });
            waiting.state = Waits::ForRoom;
            if newcomer.kind == NewcomerKind::Harvest {
                let is_early = |at: &Duration| self.now < *at + self.settings.replace_after;
                if self.evicted_at.get(&newcomer.id).is_some_and(is_early) {
                    self.hold(newcomer, Waits::AfterEviction);
                    continue;
                }
                let is_within = harvest_vms < self.settings.harvest_quota;
                harvest_vms += usize::from(self.harvest(newcomer, is_within, &mut needs));
            } else {
                self.urgent(newcomer, &mut needs);
            }
        }
        needs
    }

    fn impossible(&self, newcomer: &Newcomer) -> Option<RefuseWhy> {
        let nodes = self.books.nodes();
        if newcomer.bytes == 0 {
            return Some(RefuseWhy::NoMemory);
        }
        if let Some(node) = newcomer.node.filter(|node| *node >= nodes) {
            return Some(RefuseWhy::NoSuchNode { node, nodes });
        }
        let (cores, total_cores) = (newcomer.cores, self.books.cores.total);
        if u64::from(cores) > total_cores {
            return Some(RefuseWhy::TooManyCores { cores, total_cores });
        }
        if !self.waiting.contains_key(&newcomer.id) && self.waiting.len() >= MAX_WAITING {
            return Some(RefuseWhy::TooManyWait { most: MAX_WAITING });
        }
        None
    }

    fn chunks(&self, newcomer: &Newcomer) -> u64 {
        let chunk = self.settings.chunk_bytes;
        newcomer.bytes.checked_next_multiple_of(chunk).unwrap_or(u64::MAX / chunk * chunk)
    }

    fn allowed(&self, newcomer: &Newcomer) -> std::ops::Range<usize> {
        newcomer.node.map_or(0..self.books.nodes(), |node| node..node + 1)
    }

    /// Admits or refuses a regular or spot VM, or makes it wait.
    fn urgent(&mut self, newcomer: &Newcomer, needs: &mut Needs) {
        let bytes = self.chunks(newcomer);
        let nodes = self.books.nodes();
        let free: Vec<u64> =
            (0..nodes).map(|n| self.books.free(n).saturating_sub(needs.of(n))).collect();
        let missing_cores = self.missing_cores(newcomer, needs);
        let reachable_cores = self.books.cores.reach().saturating_sub(needs.urgent_cores);
        if u64::from(newcomer.cores) > reachable_cores {
            let why = RefuseWhy::NoCores { cores: newcomer.cores, reachable_cores };
            return self.refuse(newcomer, why);
        }
        let allowed = self.allowed(newcomer);
        let single = |node: usize| {
            let mut parts = vec![0; nodes];
            parts[node] = bytes;
            parts
        };
        let before = self.waiting.get(&newcomer.id).and_then(|waiting| waiting.parts.clone());
        let before = before.filter(|parts| is_within_one(parts));
        if let Some(node) = placement::at_once(bytes, allowed.clone(), &free, self.buffer) {
            if missing_cores == 0 {
                return self.admit(newcomer, single(node), false);
            }
            // The VM's memory stays where it was reserved.
            let still = before.filter(|parts| fits(parts, &free));
            let parts = still.unwrap_or_else(|| single(node));
            return self.set_aside(newcomer, parts, &free, missing_cores, needs);
        }
        let reach: Vec<u64> =
            (0..nodes).map(|n| self.books.reach(n).saturating_sub(needs.urgent[n])).collect();
        let still = before.filter(|parts| fits(parts, &reach));
        let layers: Vec<Layers> = (0..nodes).map(|n| self.layers(n)).collect();
        let waited_for: Vec<u64> = (0..nodes).map(|n| needs.of(n)).collect();
        let one = still.or_else(|| {
            placement::within_reach(bytes, allowed, &reach, &waited_for, &layers).map(single)
        });
        let spans = one.is_none();
        let parts = match one {
            Some(parts) => parts,
            None => {
                let spread = match newcomer.node {
                    None => placement::spanning(bytes, &reach, self.settings.chunk_bytes),
                    Some(_) => None,
                };
                let Some(parts) = spread else {
                    let reachable_bytes = self.allowed(newcomer).map(|n| reach[n]).sum();
                    let elsewhere_bytes = reach.iter().copied().max().unwrap_or(0);
                    let asked = newcomer.bytes;
                    let why = match newcomer.node {
                        Some(_) if elsewhere_bytes >= bytes => RefuseWhy::NoRoomOnNode {
                            bytes: asked,
                            reachable_bytes,
                            elsewhere_bytes,
                        },
                        _ => RefuseWhy::NoRoom { bytes: asked, reachable_bytes },
                    };
                    return self.refuse(newcomer, why);
                };
                parts
            }
        };
        if fits(&parts, &free) && missing_cores == 0 {
            return self.admit(newcomer, parts, spans);
        }
        self.set_aside(newcomer, parts, &free, missing_cores, needs);
    }

    /// Cores that the VM needs and that are not free for it.
    fn missing_cores(&self, newcomer: &Newcomer, needs: &Needs) -> u64 {
        let free = self.books.cores.free().saturating_sub(needs.cores());
        u64::from(newcomer.cores).saturating_sub(free)
    }

    /// Makes a regular or spot VM wait, and reserves all of its memory and cores.
    fn set_aside(
        &mut self,
        newcomer: &Newcomer,
        parts: Vec<u64>,
        free: &[u64],
        missing_cores: u64,
        needs: &mut Needs,
    ) {
        for (need, part) in needs.urgent.iter_mut().zip(&parts) {
            *need = need.saturating_add(*part);
        }
        needs.urgent_cores += u64::from(newcomer.cores);
        let missing_bytes =
            parts.iter().zip(free).map(|(part, free)| part.saturating_sub(*free)).sum();
        let Some(waiting) = self.waiting.get_mut(&newcomer.id) else { return };
        waiting.parts = Some(parts.clone());
        waiting.state = match missing_bytes {
            0 => Waits::ForCores { missing_cores },
            _ => Waits::ForMemory { missing_bytes },
        };
        if missing_bytes > 0 {
            let is_spot = newcomer.kind == NewcomerKind::Spot;
            needs.who.push(Urgent { since: waiting.since, is_spot, parts });
        }
    }

    /// Admits a harvest VM, or reserves its minimum; returns whether it did either. Takes free
    /// cores, and memory that is free or harvested beyond a minimum, never the buffer.
    fn harvest(&mut self, newcomer: &Newcomer, is_within_quota: bool, needs: &mut Needs) -> bool {
        let bytes = self.chunks(newcomer);
        let nodes = self.books.nodes();
        let allowed = self.allowed(newcomer);
        let room: Vec<u64> = (0..nodes)
            .map(|n| {
                let kept = self.books.minimum[n]
                    .saturating_add(self.books.lent_used[n])
                    .saturating_add(self.buffer[n])
                    .saturating_add(needs.of(n));
                let room = if allowed.contains(&n) { self.books.reach(n) } else { 0 };
                room.saturating_sub(kept)
            })
            .collect();
        let Some(parts) = placement::spanning(bytes, &room, self.settings.chunk_bytes) else {
            self.hold(newcomer, Waits::ForRoom);
            return false;
        };
        let missing_cores = self.missing_cores(newcomer, needs);
        if missing_cores > 0 {
            self.hold(newcomer, Waits::ForCores { missing_cores });
            return false;
        }
        // Checked last: `ForQuota` means that only the quota keeps the VM out.
        if !is_within_quota {
            self.hold(newcomer, Waits::ForQuota);
            return false;
        }
        let missing = |n: usize| {
            let wanted = parts[n].saturating_add(self.buffer[n]).saturating_add(needs.of(n));
            if parts[n] == 0 { 0 } else { wanted.saturating_sub(self.books.free(n)) }
        };
        let missing: u64 = (0..nodes).map(missing).sum();
        if missing == 0 {
            self.admit(newcomer, parts, false);
            return true;
        }
        for (need, part) in needs.other.iter_mut().zip(&parts) {
            *need = need.saturating_add(*part);
        }
        needs.other_cores += u64::from(newcomer.cores);
        if let Some(waiting) = self.waiting.get_mut(&newcomer.id) {
            waiting.state = Waits::ForMemory { missing_bytes: missing };
            waiting.parts = Some(parts);
        }
        true
    }

    fn layers(&self, n: usize) -> Layers {
        Layers {
            free: self.books.free(n),
            lent_free: self.books.lent_free[n],
            ephemeral: self.books.ephemeral[n],
            harvested: self.books.harvested[n],
            lent_used: self.books.lent_used[n],
            minimum: self.books.minimum[n],
        }
    }

    fn hold(&mut self, newcomer: &Newcomer, state: Waits) {
        if let Some(waiting) = self.waiting.get_mut(&newcomer.id) {
            waiting.state = state;
            waiting.parts = None;
        }
    }

    fn admit(&mut self, newcomer: &Newcomer, parts: Vec<u64>, spans: bool) {
        let class = match newcomer.kind {
            NewcomerKind::Harvest => &mut self.books.minimum,
            NewcomerKind::Regular | NewcomerKind::Spot => &mut self.books.regular,
        };
        for (sum, part) in class.iter_mut().zip(&parts) {
            *sum += part;
        }
        let class = match newcomer.kind {
            NewcomerKind::Harvest => &mut self.books.cores.minimum,
            NewcomerKind::Regular | NewcomerKind::Spot => &mut self.books.cores.regular,
        };
        *class += u64::from(newcomer.cores);
        if let Some(waiting) = self.waiting.remove(&newcomer.id) {
            let waited = self.now.saturating_sub(waiting.since);
            if newcomer.kind == NewcomerKind::Regular {
                self.counters.regular_waited += waited;
                self.counters.regular_that_waited += u64::from(!waited.is_zero());
            }
        }
        self.counters.admitted += 1;
        self.counters.spanning += u64::from(spans);
        self.actions.push(Action::Admit { vm: newcomer.id, base_bytes: parts });
    }

    fn refuse(&mut self, newcomer: &Newcomer, why: RefuseWhy) {
        self.waiting.remove(&newcomer.id);
        self.counters.refused += 1;
        self.actions.push(Action::Refuse { vm: newcomer.id, why });
    }
}

fn fits(parts: &[u64], room: &[u64]) -> bool {
    parts.iter().zip(room).all(|(part, room)| part <= room)
}

fn is_within_one(parts: &[u64]) -> bool {
    parts.iter().filter(|part| **part > 0).count() == 1
}

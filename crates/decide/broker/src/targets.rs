//! Sets the size of everything that can give memory back.
//!
//! Shares each node out in the reverse of the order in which the classes give back. The last class
//! here gets the remainder, and so gives back first:
//!
//! 1. regular VMs, minima, newcomers: what they have, or are to have;
//! 2. extents that other hosts use;
//! 3. the buffer, and what donors have ahead of their borrowers;
//! 4. harvest VMs, up to their maxima;
//! 5. ephemeral pools;
//! 6. extents that donors could lend.
//!
//! Neither the buffer nor a harvest VM's growth is a reason to move extents that are in use, or to
//! evict.

use crate::accounts::books::{Books, Key};
use crate::admission::Needs;
use crate::host::{Device, Host, Vm, VmId};
use crate::settings::Settings;
use crate::shares::{self, Claim};
use std::collections::BTreeMap;

/// The sizes that are aimed at, in bytes.
#[derive(Clone, Debug, Default)]
pub(crate) struct Targets {
    /// Sizes of devices, by harvest VM and node.
    pub(crate) devices: BTreeMap<(VmId, usize), u64>,
    /// Limits of donors, by node.
    pub(crate) lent: Vec<u64>,
    /// Limits of ephemeral pools, by node.
    pub(crate) ephemeral: Vec<u64>,
}

impl Targets {
    /// Bytes that a harvest VM has on a node and must give back. Memory on the wrong node counts
    /// for no target: the VM owes it as soon as it is needed.
    pub(crate) fn owed(&self, vm: &Vm, device: &Device, node: usize, ordered: u64) -> u64 {
        if device.node != node {
            return device.misplaced(node);
        }
        let target = self.devices.get(&(vm.id, node)).copied().unwrap_or(0);
        device.charge(node, ordered).saturating_sub(target)
    }
}

/// One device that takes part.
struct Part<'a> {
    vm: &'a Vm,
    max_bytes: u64,
    device: &'a Device,
    /// It gives nothing back, so that others have to do with what is left.
    is_stuck: bool,
}

pub(crate) fn targets(
    settings: &Settings,
    host: &Host,
    books: &Books,
    needs: &Needs,
    buffer: &[u64],
    is_going: impl Fn(VmId) -> bool,
    is_stuck: impl Fn(Key) -> bool,
) -> Targets {
    let nodes = books.nodes();
    let mut parts = Vec::new();
    for vm in host.vms.iter().filter(|vm| !is_going(vm.id)) {
        let Some(harvest) = &vm.harvest else { continue };
        for device in harvest.devices.iter().filter(|device| device.node < nodes) {
            let is_stuck = is_stuck(Key::Device(vm.id, device.node));
            parts.push(Part { vm, max_bytes: harvest.max_bytes, device, is_stuck });
        }
    }
    let mut pool = Vec::with_capacity(nodes);
    let mut lent = Vec::with_capacity(nodes);
    for (n, buffer) in buffer.iter().enumerate() {
        let used = books.minimum[n].saturating_add(needs.of(n));
        let mut left = books.reach(n).saturating_sub(used);
        let mut take = |wanted: u64| {
            let taken = wanted.min(left);
            left -= taken;
            taken
        };
        let lent_used = take(books.lent_used[n]);
        take(*buffer);
        let ahead = host.nodes[n].lend_cap_bytes.saturating_sub(lent_used);
        lent.push(lent_used + take(ahead.min(settings.lend_ahead_bytes)));
        // Memory on the wrong node, or in pieces, cannot be harvested.
        let unusable = parts.iter().map(|part| match part.device.node == n {
            true => part.device.scattered_bytes,
            false => part.device.misplaced(n),
        });
        take(unusable.sum());
        pool.push(left);
    }

    let mut sizes = divided(&parts, &pool);
    if parts.iter().any(|part| part.is_stuck) {
        // The others have to do without what it does not give.
        let kept = pool.iter().enumerate().map(|(n, pool)| {
            let stuck = parts.iter().filter(|part| part.is_stuck && part.device.node == n);
            let kept = |part: &Part<'_>| part.device.charge(n, 0) - part.device.scattered_bytes;
            pool.saturating_sub(stuck.map(kept).sum())
        });
        let kept: Vec<u64> = kept.collect();
        let others: Vec<usize> = (0..parts.len()).filter(|&at| !parts[at].is_stuck).collect();
        let rest: Vec<Part<'_>> =
            others.iter().map(|&at| Part { is_stuck: false, ..parts[at] }).collect();
        for (at, size) in others.into_iter().zip(divided(&rest, &kept)) {
            sizes[at] = size;
        }
    }

    // A device must give back memory on a node where a VM waits. A guest that does not know its
    // nodes may give other memory.
    for (part, size) in parts.iter().zip(&mut sizes) {
        let Device { plugged_bytes, block_bytes, .. } = *part.device;
        let wanted: u64 =
            (0..nodes).filter(|n| needs.urgent[*n] > 0).map(|n| part.device.misplaced(n)).sum();
        if wanted > 0 {
            let block = block_bytes.max(1);
            *size = (*size).min(plugged_bytes.saturating_sub(wanted) / block * block);
        }
    }

    let mut targets = Targets { lent, ephemeral: vec![0; nodes], ..Targets::default() };
    for (part, size) in parts.iter().zip(sizes) {
        let node = part.device.node;
        targets.devices.insert((part.vm.id, node), size);
        // Memory that a stuck device keeps is not there for later classes either.
        let kept = if part.is_stuck { part.device.charge(node, 0) } else { 0 };
        let kept = kept.saturating_sub(part.device.scattered_bytes);
        pool[node] = pool[node].saturating_sub(size.max(kept));
    }
    let chunk = settings.chunk_bytes;
    for (n, pool) in pool.iter().enumerate() {
        let whole = |bytes: u64| bytes / chunk * chunk;
        targets.ephemeral[n] = whole((*pool).min(settings.ephemeral_cap_bytes));
        let left = pool - targets.ephemeral[n];
        let more = host.nodes[n].lend_cap_bytes.saturating_sub(targets.lent[n]);
        targets.lent[n] = whole(targets.lent[n] + left.min(more));
    }
    targets
}

/// Each node's memory in proportion to the minima. A machine's maximum goes for all of its nodes
/// together: it is used on each in proportion to what is there, and what then is left of it
/// wherever there is still some.
fn divided(parts: &[Part<'_>], pool: &[u64]) -> Vec<u64> {
    let mut sizes = vec![0; parts.len()];
    let mut left: BTreeMap<VmId, u64> = BTreeMap::new();
    let mut pool_of: BTreeMap<VmId, u64> = BTreeMap::new();
    for part in parts {
        left.insert(part.vm.id, part.max_bytes.saturating_sub(part.vm.base_total()));
        let sum = pool_of.entry(part.vm.id).or_default();
        *sum = sum.saturating_add(pool[part.device.node]);
    }
    let most = left.clone();
    let mut pool = pool.to_vec();
    for is_proportional in [true, false] {
        for (n, pool) in pool.iter_mut().enumerate() {
            let here: Vec<usize> =
                (0..parts.len()).filter(|&at| parts[at].device.node == n).collect();
            let claims: Vec<Claim> = here
                .iter()
                .map(|&at| {
                    let Part { vm, device, .. } = &parts[at];
                    let block = device.block_bytes.max(1);
                    let mut cap = left[&vm.id].min(device.max_bytes.saturating_sub(sizes[at]));
                    if is_proportional {
                        let all = u128::from(pool_of[&vm.id].max(1));
                        let mine = u128::from(most[&vm.id]) * u128::from(*pool) / all;
                        cap = cap.min(mine as u64);
                    }
                    let cap_bytes = cap / block * block;
                    Claim { weight: vm.base_total(), cap_bytes, block_bytes: block }
                })
                .collect();
            for (&at, size) in here.iter().zip(shares::divide(*pool, &claims)) {
                sizes[at] += size;
                *pool -= size;
                if let Some(left) = left.get_mut(&parts[at].vm.id) {
                    *left -= size;
                }
            }
        }
    }
    sizes
}

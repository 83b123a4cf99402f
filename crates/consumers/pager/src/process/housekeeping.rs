//! Runs periodic tasks: forked children, memory mapped past libc, statistics.

use crate::config::PagerConfig;
use crate::core::Core;
use crate::process::node::NodeLine;
use crate::process::sigterm::TERMINATED;
use crate::programs::helper;
use crate::programs::mappings::read_mappings;
use crate::programs::outside::Watch;
use crate::shared::Shared;
use crate::stats::Stats;
use hecaton_memory::{PAGE_SIZE, unix_time_ms};
use hecaton_space::Space;
use hecaton_uffd::abi::{UFFDIO_REGISTER_MODE_MISSING, UFFDIO_REGISTER_MODE_WP};
use hecaton_uffd::handover::{Command, Op, Range};
use std::collections::HashSet;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

const TICK: Duration = Duration::from_millis(100);

/// The consumer's part of the pool, and its configuration.
#[derive(Clone)]
pub(crate) struct Pool {
    pub(crate) space: Arc<Space>,
    /// The configuration that another process in this one's place would get.
    pub(crate) config: Arc<Mutex<PagerConfig>>,
}

/// Runs as long as the process.
pub(crate) fn run(shared: Arc<Shared>, pool: Pool, mut node: NodeLine) {
    let mut reported = Instant::now();
    let mut watch = Watch::new();
    loop {
        std::thread::sleep(TICK);
        if TERMINATED.load(Ordering::Relaxed) {
            shared.lock().terminate("the node is stopping");
        }
        watch_spaces(&shared);
        look_for_others(&shared, &mut watch);
        if reported.elapsed() >= Duration::from_secs(1) {
            reported = Instant::now();
            let stats = pool.stats(&shared);
            if let Some(bytes) = node.report(&stats) {
                shared.lock().set_target(bytes.map(|bytes| bytes / PAGE_SIZE as u64));
            }
        }
    }
}

impl Pool {
    /// Counters of the pager, and how the pool holds the memory.
    pub(crate) fn stats(&self, shared: &Shared) -> Stats {
        // Taken first, so that all figures are at least as new.
        let taken_at_ms = unix_time_ms();
        let mut stats = shared.lock().snapshot();
        stats.taken_at_ms = taken_at_ms;
        stats.pool = self.config().placement.in_use(&self.space);
        stats
    }

    pub(crate) fn config(&self) -> MutexGuard<'_, PagerConfig> {
        self.config.lock().expect("no thread panics with it")
    }

    pub(crate) fn node_line(&self) -> NodeLine {
        NodeLine::new(&self.config())
    }
}

/// Counts processes that are not on the pool. Children of a hypervisor do not count.
fn look_for_others(shared: &Shared, watch: &mut Watch) {
    let core = shared.lock();
    let programs = || core.live_spaces().filter(|(_, space)| space.guest.is_none());
    let attached: HashSet<i32> = programs().filter_map(|(_, space)| space.pid).collect();
    drop(core);
    if let Some(found) = watch.look_now_and_then(&attached) {
        shared.lock().stats.outside = found;
    }
}

fn watch_spaces(shared: &Shared) {
    let spaces: Vec<(usize, Option<i32>)> =
        shared.lock().live_spaces().map(|(index, space)| (index, space.pid)).collect();
    for (index, pid) in spaces {
        let mut core = shared.lock();
        let Some(space) = core.space(index) else { continue };
        if space.helper_lost {
            core.lose_helper(index);
            continue;
        }
        if space.is_due() {
            core.charge(index);
            shared.evict.notify_one();
        } else if space.is_late_child() {
            tracing::warn!("a child that does not attach is given up, and its parent goes on");
            core.end_space(index);
            shared.ring();
        } else if space.guest.is_some() {
            // The end of its connection does not prove that a hypervisor has ended.
            if space.has_ended() {
                core.end_space(index);
            } else {
                core.notice_holes(index);
            }
        }
        drop(core);
        if let Some(pid) = pid {
            register_newly_mapped(shared, index, pid);
        }
    }
}

/// Registers, from outside, memory that a program mapped by a system call of its own, past libc.
fn register_newly_mapped(shared: &Shared, index: usize, pid: i32) {
    let Ok(mappings) = read_mappings(pid) else { return };
    let mode = UFFDIO_REGISTER_MODE_MISSING | UFFDIO_REGISTER_MODE_WP;
    let mut left_alone = None;
    for mapping in mappings.iter().filter(|mapping| mapping.is_pageable()) {
        let mut core = shared.lock();
        let Some(helper) = core.helper(index) else { return };
        let Some(space) = core.space(index) else { return };
        let Some(new) = space.unregistered_part(mapping.start, mapping.end) else { continue };
        if new.len < SMALLEST {
            continue;
        }
        let left_alone = left_alone.get_or_insert_with(|| helper.read_left_alone(pid));
        if left_alone.iter().any(|range| mapping.overlaps(range)) {
            continue;
        }
        // Withhold before a page can be evicted: eviction also needs the helper, and comes later. A
        // helper that is busy (it moves pages away) gets the command at a later tick.
        let mut withhold = Command::new(Op::Withhold, 0);
        (withhold.runs[0], withhold.count) = (new, 1);
        if !helper::try_send(helper.socket, &withhold) {
            return;
        }
        // Fails if the mapping has changed since it was read, or belongs to a userfaultfd of the
        // program's own. In the first case, a later tick tries again.
        let registered = space.uffd.register(new.start, new.len, mode).is_ok();
        space.remember_registered(new);
        drop(core);
        // In parts, so that faults do not wait for the whole range.
        for at in (0..new.len).step_by(PART).take_while(|_| registered) {
            let part = Range { start: new.start + at, len: (new.len - at).min(PART as u64) };
            let mut core = shared.lock();
            if core.space(index).is_none() {
                return;
            }
            match core.discover_pages_of_running(index, part) {
                Ok(true) => {}
                Ok(false) => {
                    let space = core.space(index).expect("just looked at");
                    space.forget_registered(part.start, new.start + new.len);
                    break;
                }
                Err(_) => return,
            }
        }
        shared.evict.notify_one();
    }
}

/// Bytes whose pages are listed under one hold of the lock.
const PART: usize = 16 << 20;

/// Smaller mappings are left alone, as `libhecaton.so` does.
const SMALLEST: u64 = 64 << 10;

impl Core {
    /// Changes how much may be local, while the program runs.
    pub(crate) fn resize(&mut self, pages: u64) {
        self.limit = pages;
        let limits = hecaton_policy::prefetch::Limits::for_capacity(pages as usize);
        self.prefetcher.set_limits(limits);
    }
}

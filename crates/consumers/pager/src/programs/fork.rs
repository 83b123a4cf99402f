//! Forks: a child has what its parent had at that instant, also of what is in the pool.
//!
//! A program says that it is about to fork, and waits ([`hecaton_uffd::handover`]). Then
//!
//! 1. *Quiet*: no eviction batch names the parent, and none begins; what the kernel reports of it
//!    is read to the end. If the thread that is to fork could not run without a fault, it is told
//!    to begin anew.
//! 2. *Copy*: the child gets an address space with its parent's entries. A space page that both
//!    name has two references and is not overwritten: who changes its copy gets another page when
//!    that is evicted.
//! 3. *Go*: the parent forks. From here on the pager reads no reports of the kernel on the parent.
//!    So a parent's thread that frees, moves or writes pages stops at the first report that
//!    matters. The copy stays true until the fork has happened.
//! 4. *Attach*: the child sends a userfaultfd. The parent's reports are read: what moved before the
//!    fork moves in the copy too. The child's mappings are registered, and the entries compared
//!    with what is in its memory. Both go on.
//!
//! The connection ends when neither parent nor child holds it any more: then there is no child, and
//! its copy is torn down. A child that is stopped at the wrong moment is given up after a while.
//!
//! Which came first, the fork or another thread's change of a mapping, is told by what the child
//! has mapped. That is not ambiguous, because libc makes no mapping, which might take the place of
//! one that went, between `Go` and the fork (`libhecaton.so` sees to it). A program that does so by
//! bare system calls, in one thread, while another forks and a third unmaps, is not covered.

use crate::core::{Core, close};
use crate::programs::address_space::AddressSpace;
use crate::programs::attach::{self, MessageFrom};
use crate::programs::helper::Helper;
use crate::programs::stage::Stage;
use crate::serve::Server;
use crate::shared::Shared;
use hecaton_uffd::Uffd;
use hecaton_uffd::handover::{Kind, Step, USES_WIPE_ON_FORK};
use std::io;
use std::os::fd::RawFd;
use std::time::Instant;

/// A program that waits to be let fork.
#[derive(Debug)]
pub(crate) struct ForkRequest {
    pub(crate) pid: i32,
    pub(crate) connection: RawFd,
    /// Numbers of pages to which the kernel writes whenever the forking thread runs.
    pub(crate) written: Vec<u64>,
}

/// How often the kernel is asked whether an address space has come to rest.
const MAX_DRAINS: usize = 10_000;

impl Core {
    /// Children that are to attach and have not yet, and their parents. None of their pages is
    /// evicted meanwhile.
    pub(crate) fn spaces_that_fork(&self) -> Vec<usize> {
        let of_fork = |(child, space): (usize, &AddressSpace)| match space.stage {
            Stage::Forking { parent } => [Some(child), parent],
            _ => [None; 2],
        };
        self.live_spaces().flat_map(of_fork).flatten().collect()
    }

    /// Whether the address space is left as it is, for a child of its own.
    pub(crate) fn is_forked_from(&self, index: usize) -> bool {
        self.children_of(index).next().is_some()
    }

    pub(crate) fn children_of(&self, index: usize) -> impl Iterator<Item = (usize, &AddressSpace)> {
        self.live_spaces()
            .filter(move |(_, space)| space.stage == Stage::Forking { parent: Some(index) })
    }

    /// An address space ends: its number may soon be another's.
    pub(crate) fn forget_parent(&mut self, index: usize) {
        let children: Vec<usize> = self.children_of(index).map(|(child, _)| child).collect();
        for child in children {
            let space = self.spaces[child].as_mut().expect("just listed");
            space.advance(&self.state, child, Stage::Forking { parent: None });
        }
    }

    /// Whether the kernel can write to these pages of a process without a fault that the pager
    /// would have to serve.
    fn are_written_without_fault(&mut self, index: usize, pages: &[u64]) -> io::Result<bool> {
        let space = self.spaces[index].as_mut().expect("named by the caller");
        for &vpn in pages {
            let page = space.mapped(vpn, 1)?[0];
            if !page.present || page.protected != Some(false) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Takes out the first request that can be granted, with the parent's index (`None`: it is not
    /// known).
    fn next_fork(&mut self) -> Option<(ForkRequest, Option<usize>)> {
        if self.turn.holds_forks(Instant::now()) {
            return None;
        }
        for at in 0..self.fork_requests.len() {
            let pid = self.fork_requests[at].pid;
            let is_it = |space: &AddressSpace| space.pid == Some(pid) && space.stage == Stage::Live;
            let parent = self.live_spaces().find(|(_, space)| is_it(space)).map(|(i, _)| i);
            let waits = parent.is_some_and(|parent| {
                self.is_forked_from(parent)
                    || self.batch.iter().any(|item| item.now_at.space() == parent)
            });
            if !waits {
                let request = self.fork_requests.remove(at).expect("within the queue");
                return Some((request, parent));
            }
        }
        None
    }
}

/// A program wants to fork.
pub(crate) fn requested(server: &mut Server, shared: &Shared, request: ForkRequest) {
    shared.lock().fork_requests.push_back(request);
    grant(server, shared);
}

/// Lets fork who can be let. Called whenever something has ended that may have stood in the way.
pub(crate) fn grant(server: &mut Server, shared: &Shared) {
    server.resume(shared);
    loop {
        let Some((request, parent)) = shared.lock().next_fork() else { return };
        let connection = request.connection;
        let refuse = |why: &str| {
            tracing::warn!(pid = request.pid, why, "a fork is refused");
            // An error means that who asked has ended.
            let _ = attach::say(connection, Step::Refused);
            close(connection);
        };
        let Some(parent) = parent else {
            refuse("the process is not known");
            continue;
        };
        if !drain(server, shared, parent) {
            refuse("its mappings do not come to rest");
            continue;
        }
        let mut core = shared.lock();
        // Draining has served faults, and thereby may have ended what was looked at.
        if core.failed.is_some() || core.space(parent).is_none() {
            refuse("it is being ended");
            continue;
        }
        if core.batch.iter().any(|item| item.now_at.space() == parent) {
            core.fork_requests.push_front(request);
            return;
        }
        match core.are_written_without_fault(parent, &request.written) {
            Ok(true) => {}
            Ok(false) => {
                tracing::debug!(
                    pid = request.pid,
                    "a fork begins anew: its thread has lost a page"
                );
                // An error means that the parent has ended.
                let _ = attach::say(connection, Step::Again);
                close(connection);
                continue;
            }
            Err(error) => {
                refuse(&format!("its pages cannot be looked at: {error}"));
                continue;
            }
        }
        let Some(child) = core.copy_for_child(parent, connection) else {
            refuse("there are too many processes on one pager");
            continue;
        };
        server.pause(&core, parent);
        drop(core);
        announce(server, shared, child, connection);
    }
}

/// Says `Go`, for the first time or once more.
fn announce(server: &mut Server, shared: &Shared, child: usize, connection: RawFd) {
    let said = attach::say(connection, Step::Go).is_ok();
    if !said || server.watch_child(child, connection).is_err() {
        shared.lock().end_space(child);
        server.resume(shared);
    }
}

/// The connection of a child that is to come says something, or has ended.
pub(crate) fn child_speaks(server: &mut Server, shared: &Shared, child: usize) {
    let mut core = shared.lock();
    let Some(space) = core.space(child) else { return };
    let Stage::Forking { parent } = space.stage else { return };
    let Some(helper) = space.helper else { return };
    let connection = helper.socket;
    drop(core);
    let result = match attach::receive(connection) {
        Ok(Some(said)) => attach_child(server, shared, child, parent, said),
        // Nothing yet.
        Ok(None) => return,
        Err(error) => Err(error.to_string()),
    };
    match result {
        Ok(()) => {
            server.unwatch(connection);
            begin_to_serve(server, shared, child);
        }
        Err(why) => {
            tracing::debug!(why, "a fork comes to nothing");
            shared.lock().end_space(child);
        }
    }
    grant(server, shared);
}

fn attach_child(
    server: &mut Server,
    shared: &Shared,
    child: usize,
    parent: Option<usize>,
    MessageFrom { attach, uffd, pid }: MessageFrom,
) -> Result<(), String> {
    let (Some(uffd), Some(pid), true) = (uffd, pid, attach.kind == Kind::Child as u32) else {
        uffd.into_iter().for_each(close);
        return Err("what it says is not an attach message".into());
    };
    let refuse = |why: String| {
        close(uffd);
        why
    };
    let mut core = shared.lock();
    let core_ref = &mut *core;
    let space = core_ref.spaces[child].as_mut().expect("checked by the caller");
    space.pid = Some(pid);
    // From here on what moves in the parent is looked for in the child.
    space.save(&core_ref.state, child);
    let helper = Helper::of(&attach, space.helper.expect("checked by the caller").socket);
    drop(core);
    if !attach::is_readable(pid, &attach.own) {
        return Err(refuse(attach::UNREADABLE.into()));
    }
    if let Some(parent) = parent
        && !drain(server, shared, parent)
    {
        return Err(refuse("its parent's mappings do not come to rest".into()));
    }
    let mut core = shared.lock();
    if core.space(child).is_none() {
        return Err(refuse("it was given up".into()));
    }
    let wipes = attach.flags & USES_WIPE_ON_FORK != 0;
    core.adopt_child(child, Uffd(uffd), wipes).map_err(refuse)?;
    let core = &mut *core;
    let space = core.spaces[child].as_mut().expect("just looked at");
    space.uffd = Uffd(uffd);
    space.helper = Some(helper);
    space.since = Instant::now();
    core.hold_and_welcome(child);
    Ok(())
}

/// Welcomes an address space that is ready.
pub(crate) fn begin_to_serve(server: &mut Server, shared: &Shared, index: usize) {
    let mut guard = shared.lock();
    let core = &mut *guard;
    let Some(space) = core.space(index) else { return };
    let (uffd, socket) = (space.uffd, space.helper.map(|helper| helper.socket));
    let welcomed = socket.is_some_and(|socket| attach::say(socket, Step::Welcome).is_ok());
    let space = core.spaces[index].as_mut().expect("just looked at");
    space.advance(&core.state, index, Stage::Live);
    if !welcomed {
        return core.end_space(index);
    }
    drop(guard);
    server.watch_space(index, uffd, socket);
}

/// For a successor: says again what may not have been said.
pub(crate) fn take_over(server: &mut Server, shared: &Shared) {
    let core = shared.lock();
    let spaces: Vec<_> = core
        .live_spaces()
        .filter_map(|(index, space)| Some((index, space.stage, space.helper?.socket)))
        .collect();
    drop(core);
    for (index, stage, connection) in spaces {
        match stage {
            Stage::Welcoming => begin_to_serve(server, shared, index),
            Stage::Forking { parent } => {
                let core = shared.lock();
                if let Some(parent) = parent {
                    server.pause(&core, parent);
                }
                drop(core);
                announce(server, shared, index, connection);
            }
            Stage::Preparing | Stage::Live => {}
        }
    }
}

/// Reads what the kernel has to say of an address space until nothing is left and no change of its
/// mappings is under way that it would say something of. False if that does not come to an end.
fn drain(server: &mut Server, shared: &Shared, space: usize) -> bool {
    for _ in 0..MAX_DRAINS {
        let read = server.read_faults(space);
        let Some(uffd) = shared.lock().space(space).map(|space| space.uffd) else { return true };
        if read == 0 && !uffd.is_changing() {
            return true;
        }
        if read == 0 {
            rustix::thread::sched_yield();
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::programs::inherit::tests::{PARENT, connection, pager};
    use crate::state::tables::Key;
    use hecaton_memory::PAGE_SIZE;
    use hecaton_uffd::abi::{UFFDIO_REGISTER_MODE_MISSING, UFFDIO_REGISTER_MODE_WP};
    use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous};
    use std::time::Duration;

    /// The kernel writes to the thread's memory before it returns from the call that waits for
    /// `Go`, and then nobody serves a fault.
    #[test]
    fn a_fork_needs_memory_that_its_thread_can_write_to() {
        let mut core = pager();
        let (protection, len) = (ProtFlags::READ | ProtFlags::WRITE, PAGE_SIZE);
        // SAFETY: a new mapping at an address of the kernel's choice.
        let page = unsafe {
            mmap_anonymous(std::ptr::null_mut(), len, protection, MapFlags::PRIVATE).unwrap()
        };
        let at = page as u64;
        let page_number = at / PAGE_SIZE as u64;
        let mut is_ready = || core.are_written_without_fault(PARENT, &[page_number]).unwrap();
        assert!(!is_ready());
        // SAFETY: in the mapping, which nobody else knows.
        let write = || unsafe { page.cast::<u8>().write_volatile(1) };
        write();
        assert!(is_ready());
        if let Ok(uffd) = Uffd::open() {
            uffd.api(0).unwrap();
            let mode = UFFDIO_REGISTER_MODE_MISSING | UFFDIO_REGISTER_MODE_WP;
            uffd.register(at, len as u64, mode).unwrap();
            uffd.protect(at, len as u64).unwrap();
            assert!(!is_ready());
            uffd.unprotect(at, len as u64).unwrap();
            assert!(is_ready());
            close(uffd.0);
        } else {
            println!("skipped: a_fork_needs_memory_that_its_thread_can_write_to: no userfaultfd");
        }
        // SAFETY: as above.
        unsafe { madvise(page, len, Advice::LinuxDontNeed).unwrap() };
        assert!(!is_ready());
        // Nobody has that.
        assert!(core.are_written_without_fault(PARENT, &[u64::MAX / PAGE_SIZE as u64]).is_err());
    }

    #[test]
    fn one_fork_of_a_process_at_a_time_and_the_evictor_in_between() {
        let mut core = pager();
        let pid = std::process::id() as i32;
        let request = |pid| ForkRequest { pid, connection: -1, written: Vec::new() };
        core.fork_requests.push_back(request(pid));
        // In the future: the evictor's turn does not end while the test runs.
        core.turn.is_blocked(Instant::now() + Duration::from_secs(3600));
        assert!(core.next_fork().is_none());
        core.turn.end();

        let key = Key::new(PARENT, 1 << 20);
        core.batch = vec![crate::core::BatchItem { key, now_at: key }];
        assert!(core.next_fork().is_none());
        // Another process need not wait for the first.
        core.fork_requests.push_back(request(pid + 1));
        assert!(matches!(core.next_fork(), Some((_, None))));
        core.batch.clear();

        let child = core.copy_for_child(PARENT, connection()).unwrap();
        assert!(core.next_fork().is_none());
        core.spaces[child].as_mut().unwrap().helper = None;
        core.end_space(child);
        assert!(matches!(core.next_fork(), Some((_, Some(PARENT)))));
        assert!(core.fork_requests.is_empty());
    }
}

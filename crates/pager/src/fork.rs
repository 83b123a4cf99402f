//! Forks: a child has what its parent had at that instant, also of what is in the pool.
//!
//! A program says that it is about to fork, and waits ([`hecaton_uffd::handover`]). Then
//!
//! 1. *Quiet*: no eviction batch names the parent, and none begins; what the kernel reports of it is
//!    read to the end.
//! 2. *Copy*: the child gets an address space with its parent's entries. A space page that both name
//!    has two references and is not overwritten: who changes its copy gets another page when that
//!    is evicted.
//! 3. *Go*: the parent forks. From here on nothing that the kernel reports of the parent is read, so
//!    that its threads, which may free, move or write pages, come to a stop at the first that
//!    matters, and the copy stays true until the fork has happened.
//! 4. *Attach*: the child sends a userfaultfd. The parent's reports are read: what moved before the
//!    fork moves in the copy too. The child's mappings are registered, and the entries compared with
//!    what is in its memory. Both go on.
//!
//! The connection ends when neither parent nor child holds it any more: then there is no child, and
//! its copy is torn down. A child that is stopped at the wrong moment is given up after a while.
//!
//! Which came first, the fork or another thread's change of a mapping, is told by what the child has
//! mapped. That is not ambiguous, because libc makes no mapping, which might take the place of one
//! that went, between `Go` and the fork (`libhecaton.so` sees to it). A program that does so by bare
//! system calls, in one thread, while another forks and a third unmaps, is not covered.

use crate::address_space::AddressSpace;
use crate::attach::{self, MessageFrom};
use crate::core::{Core, close};
use crate::guard::helper_label;
use crate::helper::Helper;
use crate::mappings::{Mapping, read_mappings};
use crate::serve::Server;
use crate::shared::Shared;
use crate::stage::Stage;
use crate::state::CHUNK_PAGES;
use crate::state::entry::{Entry, Place};
use crate::tables::{ALL_PAGES, Key};
use hecaton_memory::PAGE_SIZE;
use hecaton_policy::evict::Installed;
use hecaton_uffd::Uffd;
use hecaton_uffd::abi::{UFFDIO_REGISTER_MODE_MISSING, UFFDIO_REGISTER_MODE_WP};
use hecaton_uffd::handover::{Kind, Range, Step};
use std::os::fd::RawFd;
use std::time::{Duration, Instant};

const PAGE: u64 = PAGE_SIZE as u64;

/// A program that waits to be let fork.
#[derive(Debug)]
pub(crate) struct ForkRequest {
    pub(crate) pid: i32,
    pub(crate) connection: RawFd,
}

/// How long forks make way for the evictor, which may be waiting for something else.
const EVICTOR_FIRST: Duration = Duration::from_millis(50);

/// How often the kernel is asked whether an address space has come to rest.
const MAX_DRAINS: usize = 10_000;

impl Core {
    /// Whether a child is to attach that has not yet. Nothing is evicted meanwhile.
    pub(crate) fn is_forking(&self) -> bool {
        self.live_spaces().any(|(_, space)| matches!(space.stage, Stage::Forking { .. }))
    }

    /// Whether the address space is left as it is, for a child of its own.
    pub(crate) fn is_forked_from(&self, index: usize) -> bool {
        self.children_of(index).next().is_some()
    }

    fn children_of(&self, index: usize) -> impl Iterator<Item = (usize, &AddressSpace)> {
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

    /// Takes out the first request that can be granted, with the parent's index (`None`: it is not
    /// known).
    fn next_fork(&mut self) -> Option<(ForkRequest, Option<usize>)> {
        let evictor_first =
            self.eviction_is_next.is_some_and(|since| since.elapsed() < EVICTOR_FIRST);
        if evictor_first {
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

    /// Makes the child's address space. `None`: there are too many processes.
    fn copy_for_child(&mut self, parent: usize, connection: RawFd) -> Option<usize> {
        let mut space = AddressSpace::new(Uffd(-1), Helper::only_connection(connection));
        space.stage = Stage::Preparing;
        let child = self.add_space(space)?;
        for first in self.tables.chunks_in(parent, ALL_PAGES) {
            for key in (0..CHUNK_PAGES).map(|i| first.plus(i)) {
                let entry = self.get(key);
                if entry.place() != Place::Zero && !self.inherit(Key::new(child, key.vpn()), entry)
                {
                    // The parent keeps the connection, to be told why.
                    self.spaces[child].as_mut().expect("just made").helper = None;
                    self.end_space(child);
                    return None;
                }
            }
        }
        let space = self.spaces[child].as_mut().expect("just made");
        // Once the parent has forked, nobody but the child has this connection's other end.
        self.guard.hold(vec![helper_label(space.serial)], &[connection]);
        space.advance(&self.state, child, Stage::Forking { parent: Some(parent) });
        Some(child)
    }

    /// False if no more processes can share an evicted page.
    fn inherit(&mut self, key: Key, parents: Entry) -> bool {
        let mut entry = parents;
        if entry.place() == Place::Fetching {
            entry = entry.with_place(Place::Out).with_awaited(false).with_dirty(false);
        }
        if let Some(page) = entry.space_page()
            && !self.pages.share(&self.state, page)
        {
            if entry.place() == Place::Out {
                return false;
            }
            entry = entry.with_space_page(None).with_dirty(true);
        }
        self.set(key, entry);
        if entry.place() == Place::Resident {
            self.count_in(key, Installed::Demand);
        }
        true
    }

    /// `mremap` has moved a range of the parent's, about when it forked.
    pub(crate) fn moved_at_fork(&mut self, parent: usize, from: u64, to: u64, len: u64) {
        let children: Vec<(usize, i32)> = self
            .children_of(parent)
            .filter_map(|(child, space)| Some((child, space.pid?)))
            .collect();
        for (child, pid) in children {
            // An error means that the child has ended, which its connection tells.
            let Ok(mappings) = read_mappings(pid) else { continue };
            let is_mapped = |start| {
                let range = Range { start, len };
                mappings.iter().any(|mapping| mapping.overlaps(&range))
            };
            // If both are, it was moved onto another mapping after the fork: none was made in the
            // place of the old one before.
            if is_mapped(to) && !is_mapped(from) {
                self.move_entries(child, from, to, len);
            }
        }
    }

    fn has_entries(&mut self, space: usize, start: u64, end: u64) -> bool {
        let (first, end) = (start / PAGE, end.div_ceil(PAGE));
        let chunks = self.tables.chunks_in(space, first..end);
        chunks.into_iter().any(|chunk| {
            let pages = chunk.vpn().max(first)..(chunk.vpn() + CHUNK_PAGES).min(end);
            pages.into_iter().any(|vpn| self.get(Key::new(space, vpn)) != Entry::ZERO)
        })
    }

    /// The child has attached, and waits: brings its mappings and its entries in line. May be done
    /// twice.
    fn adopt_child(&mut self, child: usize, uffd: Uffd) -> Result<(), String> {
        let space = self.spaces[child].as_mut().expect("it has just attached");
        let pid = space.pid.expect("it has said so");
        let gone = |error: std::io::Error| format!("its memory cannot be looked at: {error}");
        let mappings = read_mappings(pid).map_err(gone)?;
        let mode = UFFDIO_REGISTER_MODE_MISSING | UFFDIO_REGISTER_MODE_WP;
        let mut registered: Vec<&Mapping> = Vec::new();
        for mapping in mappings.iter().filter(|mapping| mapping.anonymous) {
            let (start, len) = (mapping.start, mapping.end - mapping.start);
            // Others had nothing of the parent's in them that the pager knows of: housekeeping
            // finds them.
            if !self.has_entries(child, start, mapping.end) {
                continue;
            }
            uffd.register(start, len, mode).map_err(|errno| {
                let error = std::io::Error::from(errno);
                format!("memory at {start:#x} cannot be registered: {error}")
            })?;
            registered.push(mapping);
            let space = self.spaces[child].as_mut().expect("as above");
            space.remember_registered(Range { start, len });
        }
        self.discard_unmapped(child, &registered);
        for mapping in registered {
            let (first, end) = (mapping.start / PAGE, mapping.end / PAGE);
            for chunk in self.tables.chunks_in(child, first..end) {
                let chunk = chunk.vpn();
                let pages = chunk.max(first)..(chunk + CHUNK_PAGES).min(end);
                self.adopt_pages_of_child(child, uffd, pages).map_err(gone)?;
            }
        }
        let space = self.spaces[child].as_mut().expect("as above");
        space.inherited = space.resident;
        Ok(())
    }

    /// What the parent had unmapped before it forked.
    fn discard_unmapped(&mut self, child: usize, registered: &[&Mapping]) {
        for chunk in self.tables.chunks_in(child, ALL_PAGES) {
            for key in (0..CHUNK_PAGES).map(|i| chunk.plus(i)) {
                let at = key.address();
                let next = registered.partition_point(|mapping| mapping.start <= at);
                let is_mapped = next > 0 && at < registered[next - 1].end;
                if !is_mapped && self.get(key) != Entry::ZERO {
                    self.discard(key);
                }
            }
        }
    }

    /// Compares entries with what is in the child's memory.
    ///
    /// No clean page of the parent's has been written to since its entry was copied, since the
    /// fault was not served; so the child's is clean too, and is protected again.
    fn adopt_pages_of_child(
        &mut self,
        child: usize,
        uffd: Uffd,
        pages: std::ops::Range<u64>,
    ) -> std::io::Result<()> {
        let space = self.spaces[child].as_mut().expect("it has just attached");
        let mapped = space.mapped(pages.start, (pages.end - pages.start) as usize)?;
        let mut clean: Option<Range> = None;
        for (vpn, mapped) in pages.zip(mapped) {
            let key = Key::new(child, vpn);
            let entry = self.get(key);
            let stays_clean = mapped.present && entry.is_clean_resident();
            match entry.place() {
                _ if stays_clean => {}
                Place::Zero | Place::Out | Place::Fetching if mapped.present => {
                    // It came into the parent's memory before the fork, after the copy.
                    self.set(key, entry.with_place(Place::Resident).with_dirty(true));
                    self.count_in(key, Installed::Demand);
                }
                // The parent freed it.
                Place::Resident if !mapped.present => self.discard(key),
                _ => {}
            }
            match &mut clean {
                Some(run) if stays_clean && run.start + run.len == key.address() => run.len += PAGE,
                _ => {
                    self.protect_again(child, uffd, clean.take());
                    clean = stays_clean.then_some(Range { start: key.address(), len: PAGE });
                }
            }
        }
        self.protect_again(child, uffd, clean);
        Ok(())
    }

    fn protect_again(&mut self, child: usize, uffd: Uffd, clean: Option<Range>) {
        let Some(run) = clean else { return };
        if uffd.protect(run.start, run.len).is_err() {
            for vpn in run.start / PAGE..(run.start + run.len) / PAGE {
                let key = Key::new(child, vpn);
                let entry = self.get(key);
                self.set(key, entry.with_dirty(true));
            }
        }
    }
}

/// A program wants to fork.
pub(crate) fn requested(server: &mut Server, shared: &Shared, connection: RawFd, pid: i32) {
    shared.lock().fork_requests.push_back(ForkRequest { pid, connection });
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
    core.adopt_child(child, Uffd(uffd)).map_err(refuse)?;
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
    use crate::guard::Guard;
    use crate::state::State;
    use crate::state::record::Record;
    use std::os::fd::{BorrowedFd, IntoRawFd};
    use std::os::unix::net::UnixStream;

    const PARENT: usize = 0;

    /// One whose other end is closed.
    fn connection() -> RawFd {
        UnixStream::pair().unwrap().0.into_raw_fd()
    }

    /// A pager with one live program, which is this process.
    fn pager() -> Core {
        let fd = State::create().unwrap();
        // SAFETY: just created, never closed.
        let (state, _) = State::open(unsafe { BorrowedFd::borrow_raw(fd) }).unwrap();
        let guard = Guard::new(connection()).unwrap();
        let mut core = Core::new(state, guard, 1 << 14);
        let mut space = AddressSpace::new(Uffd(-1), Helper::only_connection(-1));
        space.pid = Some(std::process::id() as i32);
        space.stage = Stage::Live;
        assert_eq!(core.add_space(space), Some(PARENT));
        core
    }

    /// An entry of a page that is in the pool.
    fn put_out(core: &mut Core, key: Key) -> u64 {
        let page = core.pages.allocate(&core.state, key);
        core.pages.set_record(&core.state, page, Record::FREE.with_refs(1).with_stored(true));
        core.set(key, Entry::ZERO.with_place(Place::Out).with_space_page(Some(page)));
        page
    }

    #[test]
    fn a_child_shares_what_is_in_the_pool_until_it_ends() {
        let mut core = pager();
        let (out, fetching) = (Key::new(PARENT, 1 << 20), Key::new(PARENT, (1 << 20) + 700));
        let page = put_out(&mut core, out);
        put_out(&mut core, fetching);
        let entry = core.get(fetching);
        core.set(fetching, entry.with_place(Place::Fetching).with_awaited(true));

        let child = core.copy_for_child(PARENT, connection()).unwrap();
        let stage = core.spaces[child].as_ref().unwrap().stage;
        assert_eq!(stage, Stage::Forking { parent: Some(PARENT) });
        assert!(core.is_forking() && core.is_forked_from(PARENT) && !core.is_forked_from(child));
        assert_eq!(core.pages.record(&core.state, page).refs(), 2);
        let theirs = core.get(Key::new(child, fetching.vpn()));
        assert_eq!((theirs.place(), theirs.is_awaited()), (Place::Out, false));
        let loaded = AddressSpace::load(&core.state, child).unwrap();
        assert_eq!((loaded.stage, loaded.uffd), (stage, Uffd(-1)));

        core.spaces[child].as_mut().unwrap().helper = None;
        core.end_space(child);
        assert!(!core.is_forking());
        assert_eq!(core.pages.record(&core.state, page).refs(), 1);
        assert_eq!(core.get(out).place(), Place::Out);
    }

    #[test]
    fn a_parent_that_ends_leaves_its_child() {
        let mut core = pager();
        let page = put_out(&mut core, Key::new(PARENT, 1 << 20));
        let child = core.copy_for_child(PARENT, connection()).unwrap();
        core.spaces[PARENT].as_mut().unwrap().helper = None;
        core.end_space(PARENT);
        let stage = core.spaces[child].as_ref().unwrap().stage;
        assert_eq!(stage, Stage::Forking { parent: None });
        assert_eq!(core.pages.record(&core.state, page).refs(), 1);
    }

    #[test]
    fn what_moved_before_the_fork_moves_in_the_copy() {
        // The child's mappings are this process's: one range is mapped, the other is not.
        let memory = vec![0u8; 1 << 20];
        let mapped = (memory.as_ptr() as u64).next_multiple_of(PAGE);
        let (unmapped, len) = (0x10_0000, 4 * PAGE);
        for (from, to, moves) in [(unmapped, mapped, true), (mapped, unmapped, false)] {
            let mut core = pager();
            let page = put_out(&mut core, Key::new(PARENT, from / PAGE + 1));
            let child = core.copy_for_child(PARENT, connection()).unwrap();
            core.spaces[child].as_mut().unwrap().pid = Some(std::process::id() as i32);
            for _ in 0..2 {
                // A message may be acted upon twice.
                core.moved_at_fork(PARENT, from, to, len);
            }
            let at = |core: &mut Core, start: u64| {
                core.get(Key::new(child, start / PAGE + 1)).space_page()
            };
            let expected = if moves { (None, Some(page)) } else { (Some(page), None) };
            assert_eq!((at(&mut core, from), at(&mut core, to)), expected);
        }
    }

    #[test]
    fn one_fork_of_a_process_at_a_time_and_the_evictor_in_between() {
        let mut core = pager();
        let pid = std::process::id() as i32;
        let request = |pid| ForkRequest { pid, connection: -1 };
        core.fork_requests.push_back(request(pid));
        core.eviction_is_next = Some(Instant::now());
        assert!(core.next_fork().is_none());
        core.eviction_is_next = None;

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

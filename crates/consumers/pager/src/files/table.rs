//! Lists the files, their names and their handles in the state file.
//!
//! A successor gets those requests again that its predecessor executed and did not answer. So each
//! handle holds the number of the request that opened it, stored in one word: a request that is
//! resent finds the handle, and opens the file only once.

use crate::state::{FILE_WORDS, MAX_FILES, MAX_HANDLES, State};
use std::collections::HashMap;
use std::sync::atomic::Ordering::{Relaxed, Release};

/// Longest name, in bytes.
pub(crate) const MAX_NAME: usize = 255;

/// Words of a record. The serial number is 0 if the record is free.
const SERIAL: usize = 0;
const SIZE: usize = 1;
const MODE: usize = 2;
const OWNER: usize = 3;
const NAME_LEN: usize = 4;
const MODIFIED: usize = 5;
const NAME: usize = 8;
const _: () = assert!((FILE_WORDS - NAME) * 8 > MAX_NAME);

/// The root has inode number 1.
const FIRST_NODE: u64 = 2;

/// A handle's word, 0 if it is free: from bit 48 on the file plus one, below it the number of the
/// request that opened it.
const FILE_SHIFT: u32 = 48;
const NUMBER: u64 = (1 << FILE_SHIFT) - 1;

/// Owner and permissions of a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Owner {
    pub(crate) mode: u32,
    pub(crate) user: u32,
    pub(crate) group: u32,
}

/// A copy, for look-ups, of the record of a file in use.
#[derive(Debug)]
struct File {
    node: u64,
    name: Option<Vec<u8>>,
    opens: u32,
}

/// All files of the pager.
#[derive(Default)]
pub(crate) struct Table {
    files: Vec<Option<File>>,
    by_node: HashMap<u64, usize>,
    by_name: HashMap<Vec<u8>, usize>,
    /// Handles below `next_handle` that are free.
    free_handles: Vec<usize>,
    next_handle: usize,
}

impl Table {
    /// Loads the files of the predecessor; none from a new state file.
    pub(crate) fn load(state: &State) -> Table {
        let mut table = Table::default();
        let [files, handles] = state.files_and_handles_ever();
        for index in 0..files {
            let words = words(state, index);
            let serial = words[SERIAL].load(Relaxed);
            table.files.push(None);
            if serial > 0 {
                let name = (words[NAME_LEN].load(Relaxed) > 0).then(|| read_name(state, index));
                table.enter(index, serial, name);
            }
        }
        table.next_handle = handles;
        for handle in 0..handles {
            match table.file_of(state, handle) {
                Some(file) => table.files[file].as_mut().expect("it is in use").opens += 1,
                None => {
                    // Free, or the record was not complete: the kernel resends that request.
                    state.handles[handle].store(0, Relaxed);
                    table.free_handles.push(handle);
                }
            }
        }
        table
    }

    /// Files with neither a name nor a handle: the predecessor was killed before it removed them.
    pub(crate) fn unreachable(&self) -> Vec<usize> {
        (0..self.files.len()).filter(|&index| self.is_unused(index)).collect()
    }

    fn enter(&mut self, index: usize, serial: u64, name: Option<Vec<u8>>) {
        let node = serial + FIRST_NODE;
        if index == self.files.len() {
            self.files.push(None);
        }
        self.by_node.insert(node, index);
        if let Some(name) = &name {
            self.by_name.insert(name.clone(), index);
        }
        self.files[index] = Some(File { node, name, opens: 0 });
    }

    pub(crate) fn used(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.files.len()).filter(|&index| self.files[index].is_some())
    }

    /// Whether any file is open.
    pub(crate) fn is_in_use(&self) -> bool {
        self.next_handle > self.free_handles.len()
    }

    /// The file with inode number `node`.
    pub(crate) fn with_node(&self, node: u64) -> Option<usize> {
        self.by_node.get(&node).copied()
    }

    pub(crate) fn named(&self, name: &[u8]) -> Option<usize> {
        self.by_name.get(name).copied()
    }

    /// The inode number of a file; 0 if the record is free.
    pub(crate) fn node(&self, file: usize) -> u64 {
        self.files[file].as_ref().map_or(0, |file| file.node)
    }

    /// Makes a file and opens it. Returns the file and the handle, or `None` if no record or no
    /// handle is free. A resent request must ask [`Table::opened_by`] first.
    pub(crate) fn create(
        &mut self,
        state: &State,
        name: Option<&[u8]>,
        owner: Owner,
        request: u64,
    ) -> Option<(usize, u64)> {
        let free = self.files.iter().position(Option::is_none);
        let index = free.unwrap_or(self.files.len());
        if index == MAX_FILES {
            return None;
        }
        // The handle first: a successor frees a handle whose file has no record.
        let handle = self.take_handle(state, index, request)?;
        let words = words(state, index);
        words[SIZE].store(0, Relaxed);
        words[MODE].store(owner.mode.into(), Relaxed);
        words[OWNER].store(u64::from(owner.user) << 32 | u64::from(owner.group), Relaxed);
        write_name(state, index, name.unwrap_or_default());
        let serial = state.next_serial();
        words[SERIAL].store(serial, Release);
        self.enter(index, serial, name.map(<[u8]>::to_vec));
        self.files[index].as_mut().expect("just entered").opens = 1;
        Some((index, handle as u64))
    }

    /// Opens a file. Returns the handle, or `None` if no handle is free. A resent request must ask
    /// [`Table::opened_by`] first.
    pub(crate) fn open(&mut self, state: &State, file: usize, request: u64) -> Option<u64> {
        let handle = self.take_handle(state, file, request)?;
        self.files[file].as_mut()?.opens += 1;
        Some(handle as u64)
    }

    /// The file that this request opened when it was first sent, and the handle.
    pub(crate) fn opened_by(&self, state: &State, request: u64) -> Option<(usize, u64)> {
        let by_it = |&handle: &usize| {
            let word = state.handles[handle].load(Relaxed);
            word != 0 && word & NUMBER == request & NUMBER
        };
        let handle = (0..self.next_handle).find(by_it)?;
        Some((self.file_of(state, handle)?, handle as u64))
    }

    /// Closes a handle. Returns the file if it has neither a name nor a handle any more.
    pub(crate) fn close(&mut self, state: &State, handle: u64) -> Option<usize> {
        let handle = usize::try_from(handle).ok().filter(|&handle| handle < self.next_handle)?;
        // A free handle was closed by the same request, before it was resent.
        let file = self.file_of(state, handle)?;
        state.handles[handle].store(0, Release);
        self.free_handles.push(handle);
        self.files[file].as_mut()?.opens -= 1;
        self.is_unused(file).then_some(file)
    }

    /// Removes a name. Returns the file if it has no handle either, and an error if no file has the
    /// name.
    pub(crate) fn unlink(&mut self, state: &State, name: &[u8]) -> Result<Option<usize>, ()> {
        let file = self.by_name.remove(name).ok_or(())?;
        write_name(state, file, b"");
        self.files[file].as_mut().ok_or(())?.name = None;
        Ok(self.is_unused(file).then_some(file))
    }

    /// Frees the record of a file that has no name, no handle and no pages.
    pub(crate) fn remove(&mut self, state: &State, file: usize) {
        words(state, file)[SERIAL].store(0, Release);
        if let Some(removed) = self.files[file].take() {
            self.by_node.remove(&removed.node);
        }
    }

    fn is_unused(&self, file: usize) -> bool {
        self.files[file].as_ref().is_some_and(|file| file.opens == 0 && file.name.is_none())
    }

    fn take_handle(&mut self, state: &State, file: usize, request: u64) -> Option<usize> {
        let handle = self.free_handles.pop().or_else(|| {
            (self.next_handle < MAX_HANDLES).then(|| {
                self.next_handle += 1;
                self.next_handle - 1
            })
        })?;
        state.note_file_and_handle(file, handle);
        let word = (file as u64 + 1) << FILE_SHIFT | request & NUMBER;
        state.handles[handle].store(word, Release);
        Some(handle)
    }

    fn file_of(&self, state: &State, handle: usize) -> Option<usize> {
        let file = (state.handles[handle].load(Relaxed) >> FILE_SHIFT).checked_sub(1)?;
        Some(file as usize).filter(|&file| self.files.get(file).is_some_and(Option::is_some))
    }

    /// Names of a file: 0 or 1.
    pub(crate) fn links(&self, file: usize) -> u32 {
        self.files[file].as_ref().is_some_and(|file| file.name.is_some()).into()
    }

    pub(crate) fn size(&self, state: &State, file: usize) -> u64 {
        words(state, file)[SIZE].load(Relaxed)
    }

    pub(crate) fn set_size(&self, state: &State, file: usize, bytes: u64) {
        words(state, file)[SIZE].store(bytes, Relaxed);
    }

    pub(crate) fn owner(&self, state: &State, file: usize) -> Owner {
        let words = words(state, file);
        let owner = words[OWNER].load(Relaxed);
        let mode = words[MODE].load(Relaxed) as u32;
        Owner { mode, user: (owner >> 32) as u32, group: owner as u32 }
    }

    pub(crate) fn set_owner(&self, state: &State, file: usize, owner: Owner) {
        let words = words(state, file);
        words[MODE].store(owner.mode.into(), Relaxed);
        words[OWNER].store(u64::from(owner.user) << 32 | u64::from(owner.group), Relaxed);
    }

    /// Seconds since 1970.
    pub(crate) fn modified(&self, state: &State, file: usize) -> u64 {
        words(state, file)[MODIFIED].load(Relaxed)
    }

    pub(crate) fn set_modified(&self, state: &State, file: usize, seconds: u64) {
        words(state, file)[MODIFIED].store(seconds, Relaxed);
    }
}

fn words(state: &State, file: usize) -> &[std::sync::atomic::AtomicU64] {
    &state.files[file * FILE_WORDS..][..FILE_WORDS]
}

fn write_name(state: &State, file: usize, name: &[u8]) {
    let words = words(state, file);
    // A successor must not read a name that was written in part.
    words[NAME_LEN].store(0, Release);
    for (word, bytes) in words[NAME..].iter().zip(name.chunks(8)) {
        let mut whole = [0; 8];
        whole[..bytes.len()].copy_from_slice(bytes);
        word.store(u64::from_ne_bytes(whole), Relaxed);
    }
    words[NAME_LEN].store(name.len() as u64, Release);
}

fn read_name(state: &State, file: usize) -> Vec<u8> {
    let words = words(state, file);
    let len = (words[NAME_LEN].load(Relaxed) as usize).min(MAX_NAME);
    let bytes = words[NAME..].iter().flat_map(|word| word.load(Relaxed).to_ne_bytes());
    bytes.take(len).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::BorrowedFd;

    const OWNER: Owner = Owner { mode: 0o100_600, user: 3, group: 4 };

    fn state() -> State {
        let fd = State::create().unwrap();
        // SAFETY: just created, never closed.
        State::open(unsafe { BorrowedFd::borrow_raw(fd) }).unwrap().0
    }

    #[test]
    fn close_and_unlink_return_a_file_without_name_and_handle() {
        let state = state();
        let mut table = Table::load(&state);
        let (file, first) = table.create(&state, Some(b"a"), OWNER, 2).unwrap();
        let second = table.open(&state, file, 4).unwrap();
        assert_eq!((table.named(b"a"), table.links(file)), (Some(file), 1));
        assert_eq!(table.close(&state, first), None);
        assert_eq!(table.close(&state, first), None, "the request is resent");
        assert_eq!(table.unlink(&state, b"a"), Ok(None));
        assert_eq!((table.named(b"a"), table.unlink(&state, b"a")), (None, Err(())));
        assert_eq!(table.close(&state, second), Some(file));
        let node = table.node(file);
        table.remove(&state, file);
        let (again, _) = table.create(&state, None, OWNER, 6).unwrap();
        assert_eq!(again, file);
        assert_ne!(table.node(again), node, "the kernel may still know the other one");
    }

    #[test]
    fn load_restores_files_names_and_handles() {
        let state = state();
        let mut table = Table::load(&state);
        let long = vec![b'x'; MAX_NAME];
        let (named, handle) = table.create(&state, Some(&long), OWNER, 2).unwrap();
        assert_eq!(table.close(&state, handle), None);
        let (open, handle) = table.create(&state, None, OWNER, 4).unwrap();
        table.set_size(&state, open, 8192);
        let (unreachable, last) = table.create(&state, None, OWNER, 6).unwrap();
        state.handles[last as usize].store(0, Relaxed);

        let mut table = Table::load(&state);
        assert_eq!(table.unreachable(), [unreachable]);
        assert_eq!((table.named(&long), table.size(&state, open)), (Some(named), 8192));
        assert_eq!(table.owner(&state, open), OWNER);
        // A request that the predecessor executed and did not answer.
        assert_eq!(table.opened_by(&state, 4), Some((open, handle)));
        assert_eq!(table.opened_by(&state, 8), None);
        assert_eq!(table.close(&state, handle), Some(open));
    }

    #[test]
    fn load_drops_a_file_whose_record_was_not_complete() {
        let state = state();
        let mut table = Table::load(&state);
        let (file, _) = table.create(&state, Some(b"a"), OWNER, 2).unwrap();
        words(&state, file)[SERIAL].store(0, Relaxed);
        let mut table = Table::load(&state);
        assert_eq!((table.unreachable(), table.opened_by(&state, 2)), (vec![], None));
        assert!(table.create(&state, Some(b"a"), OWNER, 2).is_some());
    }
}

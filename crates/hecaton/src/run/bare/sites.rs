//! Finds the system calls that make children in a program's text, and builds their replacements.
//!
//! `libhecaton.so` must see a fork before it happens. glibc's `_Fork` has the instructions
//! `mov $56, %eax; syscall` (`clone`), musl's `mov $57, %eax; syscall` (`fork`), however the
//! program is linked. The same seven bytes with another meaning would have to be data in the middle
//! of text, or lie across instructions. The launcher replaces each by a jump to a *stub* nearby.
//! The stub makes a `clone` that shares memory unchanged: threads, and `posix_spawn`.
//!
//! Pure: text and addresses come in as arguments.

/// Bytes of `mov $NUMBER, %eax; syscall`.
const SITE: usize = 7;

/// Bytes reserved for each stub.
pub(super) const STUB: u64 = 48;

/// A system call that makes children.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Call {
    Clone,
    Fork,
}

/// The offsets in `text` of system calls that make children.
pub(super) fn find(text: &[u8]) -> Vec<(usize, Call)> {
    let mut found = Vec::new();
    let mut from = 0;
    while let Some(at) = text[from..].windows(SITE).position(|bytes| call_of(bytes).is_some()) {
        let at = from + at;
        found.extend(call_of(&text[at..]).map(|call| (at, call)));
        from = at + SITE;
    }
    found
}

fn call_of(bytes: &[u8]) -> Option<Call> {
    let [0xb8, number, 0, 0, 0, 0x0f, 0x05] = bytes.first_chunk::<SITE>()? else { return None };
    match i64::from(*number) {
        libc::SYS_clone => Some(Call::Clone),
        libc::SYS_fork => Some(Call::Fork),
        _ => None,
    }
}

/// The code to write at the address `site`: a jump to `stub`. `None` if the stub is out of reach.
pub(super) fn patch(site: u64, stub: u64) -> Option<[u8; SITE]> {
    let [a, b, c, d] = distance(site + JUMP, stub)?;
    // The rest is never reached.
    Some([0xe9, a, b, c, d, 0x0f, 0x0b])
}

/// Bytes of a jump within 2 GiB.
const JUMP: u64 = 5;

fn distance(from: u64, to: u64) -> Option<[u8; 4]> {
    i32::try_from(to.wrapping_sub(from) as i64).ok().map(i32::to_le_bytes)
}

/// The code to write at the address `stub` for the call at `site`. It jumps to `follow` for a child
/// with memory of its own. `None` if `site` is out of reach.
pub(super) fn stub(call: Call, site: u64, stub: u64, follow: u64) -> Option<Vec<u8>> {
    let behind = site + SITE as u64;
    let mut code = Vec::with_capacity(STUB as usize);
    if call == Call::Clone {
        // test $CLONE_VM, %edi; jz over the next three
        code.extend([0xf7, 0xc7, 0x00, 0x01, 0x00, 0x00, 0x74, 12]);
        // mov $56, %eax; syscall
        code.extend([0xb8, libc::SYS_clone as u8, 0, 0, 0, 0x0f, 0x05]);
        // jmp behind
        code.push(0xe9);
        code.extend(distance(stub + code.len() as u64 + 4, behind)?);
    }
    // mov $behind, %r11
    code.extend([0x49, 0xbb]);
    code.extend(behind.to_le_bytes());
    // jmp *0(%rip); the address
    code.extend([0xff, 0x25, 0, 0, 0, 0]);
    code.extend(follow.to_le_bytes());
    Some(code)
}

#[cfg(test)]
mod tests {
    use super::*;

    const CLONE: [u8; SITE] = [0xb8, 56, 0, 0, 0, 0x0f, 0x05];
    const FORK: [u8; SITE] = [0xb8, 57, 0, 0, 0, 0x0f, 0x05];
    const VFORK: [u8; SITE] = [0xb8, 58, 0, 0, 0, 0x0f, 0x05];

    #[test]
    fn calls_that_copy_memory_are_found_and_no_others() {
        let text = [&[0xb8][..], &CLONE, &[0x90], &VFORK, &FORK, &FORK[..6]].concat();
        assert_eq!(find(&text), [(1, Call::Clone), (16, Call::Fork)]);
        assert_eq!(find(&[]), []);
        assert_eq!(find(&CLONE[..6]), []);
    }

    #[test]
    fn jumps_reach_two_gib() {
        assert_eq!(patch(0x1000, 0x1005), Some([0xe9, 0, 0, 0, 0, 0x0f, 0x0b]));
        assert_eq!(patch(0x1005, 0x1000), Some([0xe9, 0xf6, 0xff, 0xff, 0xff, 0x0f, 0x0b]));
        assert_eq!(patch(0, 1 << 32), None);
        assert_eq!(stub(Call::Clone, 1 << 33, 0x1000, 0), None);
    }

    #[test]
    fn a_stub_goes_on_behind_the_call_either_way() {
        let code = stub(Call::Fork, 0x40_0000, 0x30_0000, 0x7f00_0000_1234).unwrap();
        assert_eq!(&code[2..10], &0x40_0007_u64.to_le_bytes());
        assert_eq!(&code[16..], &0x7f00_0000_1234_u64.to_le_bytes());
        let shared = stub(Call::Clone, 0x40_0000, 0x30_0000, 0x7f00_0000_1234).unwrap();
        assert!(shared.ends_with(&code) && shared.len() <= STUB as usize);
        // Over `mov`, `syscall` and the jump behind the call, which is from its own end.
        assert_eq!(shared[7] as usize, shared.len() - code.len() - 8);
        let end = 0x30_0000 + (shared.len() - code.len()) as u64;
        let jump = shared[shared.len() - code.len() - 4..].first_chunk().unwrap();
        assert_eq!(end.wrapping_add_signed(i32::from_le_bytes(*jump).into()), 0x40_0007);
    }
}

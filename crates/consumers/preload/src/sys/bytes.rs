//! Copies, fills and compares bytes in the place of libc's functions.
//!
//! The compiler calls `memcpy` and its like by name, and a program may have others by these names:
//! the sanitizers' look up in memory of their own what may be accessed. That memory may be in the
//! pool, or not be served yet. So the library has its own, which no other library sees.
//!
//! Each is one string instruction: what is copied here is short.

std::arch::global_asm!(
    ".macro hecaton_function name",
    ".p2align 4",
    ".global \\name",
    ".hidden \\name",
    ".type \\name, @function",
    "\\name:",
    ".endm",
    "hecaton_function memcpy",
    "mov rax, rdi",
    "mov rcx, rdx",
    "rep movsb",
    "ret",
    // From its end, where the destination begins within the source.
    "hecaton_function memmove",
    "mov rax, rdi",
    "mov rcx, rdx",
    "mov r8, rdi",
    "sub r8, rsi",
    "cmp r8, rdx",
    "jb 2f",
    "rep movsb",
    "ret",
    "2:",
    "lea rsi, [rsi + rdx - 1]",
    "lea rdi, [rdi + rdx - 1]",
    "std",
    "rep movsb",
    "cld",
    "ret",
    "hecaton_function memset",
    "mov r8, rdi",
    "mov eax, esi",
    "mov rcx, rdx",
    "rep stosb",
    "mov rax, r8",
    "ret",
    "hecaton_function memcmp",
    "hecaton_function bcmp",
    "xor eax, eax",
    "mov rcx, rdx",
    "test rcx, rcx",
    "jz 3f",
    "repe cmpsb",
    "movzx eax, byte ptr [rdi - 1]",
    "movzx ecx, byte ptr [rsi - 1]",
    "xchg eax, ecx",
    "sub eax, ecx",
    "3:",
    "ret",
    "hecaton_function strlen",
    "xor eax, eax",
    "4:",
    "cmp byte ptr [rdi + rax], 0",
    "je 5f",
    "inc rax",
    "jmp 4b",
    "5:",
    "ret",
    ".purgem hecaton_function",
);

#[cfg(test)]
mod tests {
    use std::ffi::{c_char, c_int, c_void};

    unsafe extern "C" {
        fn memcpy(to: *mut c_void, from: *const c_void, len: usize) -> *mut c_void;
        fn memmove(to: *mut c_void, from: *const c_void, len: usize) -> *mut c_void;
        fn memset(to: *mut c_void, byte: c_int, len: usize) -> *mut c_void;
        fn memcmp(one: *const c_void, other: *const c_void, len: usize) -> c_int;
        fn strlen(text: *const c_char) -> usize;
    }

    fn numbers() -> [u8; 16] {
        std::array::from_fn(|i| i as u8)
    }

    #[test]
    fn bytes_are_moved_whichever_way_they_overlap() {
        for (to, from) in [(0, 0), (0, 3), (3, 0), (0, 8), (8, 0)] {
            for len in 0..8 {
                let (mut bytes, mut expected) = (numbers(), numbers());
                expected.copy_within(from..from + len, to);
                // SAFETY: within the array.
                unsafe {
                    let at = bytes.as_mut_ptr();
                    let moved = memmove(at.add(to).cast(), at.add(from).cast(), len);
                    assert_eq!(moved, at.add(to).cast());
                }
                assert_eq!(bytes, expected, "{len} bytes from {from} to {to}");
            }
        }
    }

    #[test]
    fn bytes_are_copied_and_filled() {
        let mut bytes = [0u8; 16];
        // SAFETY: within the arrays.
        unsafe {
            let at = bytes.as_mut_ptr().cast();
            assert_eq!(memcpy(at, numbers().as_ptr().cast(), 10), at);
            assert_eq!(memset(at, 0x107, 2), at);
        }
        assert_eq!(bytes, [7, 7, 2, 3, 4, 5, 6, 7, 8, 9, 0, 0, 0, 0, 0, 0]);
    }

    #[test]
    fn first_difference_decides_a_comparison() {
        let compare = |one: &[u8; 4], other: &[u8; 4], len| {
            // SAFETY: within the arrays.
            unsafe { memcmp(one.as_ptr().cast(), other.as_ptr().cast(), len) }
        };
        assert_eq!(compare(b"abcd", b"xbcd", 0), 0);
        assert_eq!(compare(b"abcd", b"abcd", 4), 0);
        assert_eq!(compare(b"abcd", b"abcx", 3), 0);
        assert!(compare(b"abcd", b"abda", 4) < 0);
        assert!(compare(b"ab\xff\0", b"ab\x01\xff", 4) > 0);
    }

    #[test]
    fn text_ends_at_its_zero() {
        // SAFETY: C strings.
        unsafe {
            assert_eq!(strlen(c"".as_ptr()), 0);
            assert_eq!(strlen(c"four".as_ptr()), 4);
        }
    }
}

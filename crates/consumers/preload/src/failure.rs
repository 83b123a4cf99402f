//! Says on standard error why a program cannot run on the pool.

use hecaton_uffd::Errno;
use hecaton_uffd::sys::syscall;

/// A step that failed, and the kernel's error.
pub(crate) struct Failure(pub(crate) &'static str, pub(crate) Errno);

impl Failure {
    /// Guest RAM would not be seen.
    pub(crate) const HYPERVISOR: Failure =
        Failure("guest RAM cannot be watched: libc's mmap cannot be replaced", Errno(libc::EPERM));

    /// Says so on standard error.
    pub(crate) fn report(&self) {
        self.report_with("");
    }

    /// The same, behind what follows from it.
    pub(crate) fn report_with(&self, consequence: &'static str) {
        let mut digits = [0u8; 12];
        let mut at = digits.len();
        let mut number = self.1.0.unsigned_abs();
        while at > 0 && (number > 0 || at == digits.len()) {
            at -= 1;
            digits[at] = b'0' + (number % 10) as u8;
            number /= 10;
        }
        let because = if consequence.is_empty() { "" } else { ": " };
        let parts = ["hecaton: ", consequence, because, self.0, ": error "];
        for part in parts.map(str::as_bytes).into_iter().chain([&digits[at..], b"\n"]) {
            // SAFETY: the kernel reads within the slice.
            let _ = unsafe {
                syscall(libc::SYS_write, [2, part.as_ptr() as usize, part.len(), 0, 0, 0])
            };
        }
    }

    /// A program that was asked to run on pool memory and cannot must not run on local memory
    /// unnoticed.
    pub(crate) fn report_and_exit(self) -> ! {
        self.report();
        loop {
            // SAFETY: ends the process.
            let _ = unsafe { syscall(libc::SYS_exit_group, [1, 0, 0, 0, 0, 0]) };
        }
    }
}

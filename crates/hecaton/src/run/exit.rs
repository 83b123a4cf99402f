//! The program's exit status as this command's.

use std::os::unix::process::ExitStatusExt;
use std::process::{ExitCode, ExitStatus};

/// The status as a shell shows it: 128 and the signal's number for a program that a signal ended.
pub(super) fn status(status: ExitStatus) -> u8 {
    match (status.code(), status.signal()) {
        (Some(code), _) => code as u8,
        (None, Some(signal)) => 128 + signal as u8,
        (None, None) => u8::MAX,
    }
}

pub(crate) fn code(ended: ExitStatus) -> ExitCode {
    ExitCode::from(status(ended))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_what_a_shell_shows() {
        assert_eq!(status(ExitStatus::from_raw(0)), 0);
        assert_eq!(status(ExitStatus::from_raw(7 << 8)), 7);
        assert_eq!(status(ExitStatus::from_raw(15)), 143);
        assert_eq!(status(ExitStatus::from_raw(9 | 0x80)), 137);
    }
}

//! What commands print, and what becomes of them when nobody reads it any more, as in
//! `hecaton status | head -1`.
//!
//! The standard library's `println!` panics then, with a message that helps nobody: Rust programs ignore
//! SIGPIPE. To have the signal back was rejected, because it does not only come from standard output: it
//! would end a node, a launcher or a bench at any pipe whose other side closes, in the middle of what
//! they are to clean up. So `print!` and `println!` in this crate are those below, and a command that
//! cannot print is unwound without a word, so that whatever it has started ends with it. Its status is
//! that of a command which SIGPIPE has ended. What cannot be written for other reasons is said.
//!
//! Daemons do not end for that: what they have to say at their start they [`announce`].

use std::any::Any;
use std::fmt;
use std::io::{self, Write as _};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::process::ExitCode;

/// As shells count it: 128 and the number of SIGPIPE.
const ENDED_BY_SIGPIPE: u8 = 128 + 13;

/// Unwinds a command that cannot print.
struct Unprinted(io::Error);

/// Prints to standard output, as the standard library's macro of the same name.
macro_rules! print {
    ($($text:tt)*) => { $crate::out::write(format_args!($($text)*)) };
}

/// Prints a line to standard output, as the standard library's macro of the same name.
macro_rules! println {
    () => { $crate::out::write(format_args!("\n")) };
    ($($text:tt)*) => { $crate::out::write_line(format_args!($($text)*)) };
}

/// Runs a command until it is done, or has nobody to print to.
pub(crate) fn while_read(command: impl FnOnce() -> ExitCode) -> ExitCode {
    // Nothing of the command is looked at after it was unwound.
    catch_unwind(AssertUnwindSafe(command)).unwrap_or_else(status_of)
}

fn status_of(payload: Box<dyn Any + Send>) -> ExitCode {
    match payload.downcast::<Unprinted>() {
        Ok(unprinted) if unprinted.0.kind() == io::ErrorKind::BrokenPipe => {
            ExitCode::from(ENDED_BY_SIGPIPE)
        }
        Ok(unprinted) => {
            eprintln!("hecaton: cannot write to standard output: {}", unprinted.0);
            ExitCode::FAILURE
        }
        // A panic, which has been told of.
        Err(payload) => resume_unwind(payload),
    }
}

/// Prints some text.
pub(crate) fn write(text: fmt::Arguments<'_>) {
    io::stdout().write_fmt(text).unwrap_or_else(|error| end(error));
}

/// Prints some text and the end of the line.
pub(crate) fn write_line(text: fmt::Arguments<'_>) {
    write(format_args!("{text}\n"));
}

/// Prints what is made of bytes, to its end.
pub(crate) fn write_bytes(bytes: &[u8]) {
    let mut out = io::stdout();
    out.write_all(bytes).and_then(|()| out.flush()).unwrap_or_else(|error| end(error));
}

/// Prints a line of a daemon, which goes on whether anybody reads it or not.
pub(crate) fn announce(line: fmt::Arguments<'_>) {
    if let Err(error) = writeln!(io::stdout(), "{line}") {
        tracing::debug!(%error, "nobody reads what is announced");
    }
}

/// Unwinds without the message of a panic.
fn end(error: io::Error) -> ! {
    resume_unwind(Box::new(Unprinted(error)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_without_a_reader_is_unwound_in_silence_and_a_panic_is_none() {
        let code = |code: u8| format!("{:?}", ExitCode::from(code));
        let ended = |kind| format!("{:?}", while_read(|| end(io::Error::from(kind))));
        assert_eq!(ended(io::ErrorKind::BrokenPipe), code(141));
        assert_eq!(ended(io::ErrorKind::StorageFull), code(1));
        assert_eq!(format!("{:?}", while_read(|| ExitCode::from(7))), code(7));
        let panicked = catch_unwind(|| while_read(|| resume_unwind(Box::new("a panic"))));
        assert_eq!(panicked.unwrap_err().downcast_ref(), Some(&"a panic"));
    }
}

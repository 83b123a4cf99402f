//! Prints command output, and ends a command whose reader is gone.
//!
//! In `hecaton status | head -1` the reader leaves early. Rust programs ignore SIGPIPE, so the
//! standard library's `println!` then panics with an unhelpful message. Restoring the signal was
//! rejected: SIGPIPE does not come from standard output alone. Any closed pipe would end a node,
//! launcher or bench in the middle of its cleanup. So this crate's `print!` and `println!` are the
//! macros below. A command that cannot print unwinds without a message, so that everything it
//! started ends with it. Its exit status is that of a command ended by SIGPIPE. Other write errors
//! are reported.
//!
//! Daemons continue without a reader: they [`announce`] their start.

use std::any::Any;
use std::fmt;
use std::io::{self, Write as _};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::process::ExitCode;

/// Exit status in the shell's convention: 128 plus the number of SIGPIPE.
const ENDED_BY_SIGPIPE: u8 = 128 + 13;

/// Payload that unwinds a command that cannot print.
struct Unprinted(io::Error);

/// Prints to standard output, like the standard library's macro of the same name.
macro_rules! print {
    ($($text:tt)*) => { $crate::out::write(format_args!($($text)*)) };
}

/// Prints a line to standard output, like the standard library's macro of the same name.
macro_rules! println {
    () => { $crate::out::write(format_args!("\n")) };
    ($($text:tt)*) => { $crate::out::write_line(format_args!($($text)*)) };
}

/// Runs a command until it ends or cannot print.
pub(crate) fn while_read(command: impl FnOnce() -> ExitCode) -> ExitCode {
    // No state of the command is used after it unwinds.
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
        // A real panic, which has already been reported.
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

/// Prints all bytes, and flushes.
pub(crate) fn write_bytes(bytes: &[u8]) {
    let mut out = io::stdout();
    out.write_all(bytes).and_then(|()| out.flush()).unwrap_or_else(|error| end(error));
}

/// Prints a line of a daemon, which continues even without a reader.
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

//! A program that has as much memory as it is told to, by lines of its standard input; it says each
//! line when it is done.
//!
//! `hold MIB`: so much of its own, all of it touched. `write MIB FILE`: a file, which stays in the
//! page cache. `listen`: on the socket that `HECATON_PORT` names; told there of a size to come, it
//! has no more of its own than that leaves.

use hecaton_vm::guest_port::{GuestMessage, HostMessage, Lines, line};
use std::{
    env,
    fs::File,
    io::{self, Read as _, Write as _},
    os::unix::net::UnixListener,
    sync::{Arc, Mutex},
    thread,
};

const MIB: usize = 1 << 20;

/// Bytes of a target that are kept for the program's other memory.
const REST: usize = 32 * MIB;

type Held = Arc<Mutex<Vec<u8>>>;

fn hold(held: &Held, bytes: usize) {
    let mut held = held.lock().expect("nobody panics with it");
    if held.len() != bytes {
        // Both are mappings of their own: what goes leaves at once.
        *held = Vec::new();
        *held = vec![1; bytes];
    }
}

fn write(mib: usize, path: &str) -> io::Result<()> {
    let mut file = File::create(path)?;
    let bytes = vec![1; MIB];
    for _ in 0..mib {
        file.write_all(&bytes)?;
    }
    // Until then its pages cannot be taken back.
    file.sync_all()
}

fn say(words: &str) {
    println!("{words}");
}

/// Tells what was heard until nobody speaks.
fn listen(listener: &UnixListener, held: &Held) -> io::Result<()> {
    let mut stream = listener.accept()?.0;
    stream.write_all(line(&GuestMessage::Hello).as_bytes())?;
    say("is heard");
    let mut lines = Lines::default();
    let mut bytes = [0; 4096];
    loop {
        let count = stream.read(&mut bytes)?;
        if count == 0 {
            return Ok(());
        }
        lines.take(&bytes[..count]);
        while let Some(message) = lines.next_message::<HostMessage>() {
            let Ok(HostMessage::Target { id, target_bytes, .. }) = message else { continue };
            let most = usize::try_from(target_bytes).unwrap_or(usize::MAX).saturating_sub(REST);
            let least = held.lock().expect("nobody panics with it").len().min(most);
            hold(held, least);
            say(&format!("told {}", target_bytes as usize / MIB));
            let ready = GuestMessage::Ready { id, available_bytes: 0, late: Vec::new() };
            stream.write_all(line(&ready).as_bytes())?;
        }
    }
}

fn main() -> io::Result<()> {
    let held = Held::default();
    for said in io::stdin().lines() {
        let said = said?;
        let words: Vec<&str> = said.split(' ').collect();
        match words[..] {
            ["hold", mib] => hold(&held, mib.parse::<usize>().expect("a number") * MIB),
            ["write", mib, path] => write(mib.parse().expect("a number"), path)?,
            ["listen"] => {
                let port = env::var_os("HECATON_PORT").expect("a harvest container has a port");
                let listener = UnixListener::bind(port)?;
                let held = Arc::clone(&held);
                thread::spawn(move || while listen(&listener, &held).is_ok() {});
            }
            _ => panic!("`{said}` is nothing that it does"),
        }
        say(&said);
    }
    Ok(())
}

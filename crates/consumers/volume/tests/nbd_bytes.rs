//! Runs the checks of fuzz target `nbd` on random bytes, in any test run, without a fuzzer.

#[path = "../../../../fuzz/checks/nbd.rs"]
mod check;

use check::check;
use hecaton_block::nbd::wire::OPTION_MAGIC;
use hecaton_memory::SplitMix;

const ROUNDS: u64 = 30_000;

/// An option of a client: mostly a known number, sometimes with valid data.
fn option(random: &mut SplitMix) -> Vec<u8> {
    let number = match random.draw() % 4 {
        0 => random.draw() as u32,
        // Option 7 of the protocol, which chooses the export.
        1 => 7,
        _ => random.draw() as u32 % 12,
    };
    let name: &[u8] = match random.draw() % 3 {
        0 => b"disk",
        1 => b"",
        _ => b"other",
    };
    let data = match random.draw() % 4 {
        // A name, and no requests for information.
        0 | 1 => [&(name.len() as u32).to_be_bytes(), name, &[0; 2]].concat(),
        2 => name.to_vec(),
        _ => bytes(random, 40),
    };
    let length = match random.draw() % 8 {
        0 => random.draw() as u32,
        _ => data.len() as u32,
    };
    let magic = match random.draw() % 16 {
        0 => random.draw(),
        _ => OPTION_MAGIC,
    };
    [&magic.to_be_bytes()[..], &number.to_be_bytes(), &length.to_be_bytes(), &data].concat()
}

fn bytes(random: &mut SplitMix, most: u64) -> Vec<u8> {
    (0..random.draw() % most).map(|_| random.draw() as u8).collect()
}

/// A request with small numbers in its fields, sometimes one of the protocol.
fn request(random: &mut SplitMix) -> Vec<u8> {
    let small = |random: &mut SplitMix| random.draw() >> (random.draw() % 64);
    let (flags, kind) = (small(random) as u16, random.draw() as u16 % 10);
    let (cookie, offset, length) = (random.draw(), small(random), small(random) as u32);
    let head = [&[0; 4][..], &flags.to_be_bytes(), &kind.to_be_bytes()].concat();
    [&head[..], &cookie.to_be_bytes(), &offset.to_be_bytes(), &length.to_be_bytes()].concat()
}

#[test]
fn any_bytes_are_an_option_a_request_or_the_end() {
    let mut let_in = 0;
    for round in 0..ROUNDS {
        let mut random = SplitMix::new(round);
        // `check` supplies the magic of the first option.
        let mut said = option(&mut random).split_off(8);
        for _ in 0..random.draw() % 4 {
            said.extend(option(&mut random));
        }
        for _ in 0..random.draw() % 8 {
            said.extend(request(&mut random));
        }
        said.extend(bytes(&mut random, 60));
        let_in += u64::from(check(&said));
        check(&bytes(&mut random, 300));
    }
    // Otherwise the rounds checked no requests.
    assert!(let_in > ROUNDS / 100, "{let_in} of {ROUNDS} were let in");
}

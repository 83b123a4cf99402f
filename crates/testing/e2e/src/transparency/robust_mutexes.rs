//! Ends a thread that holds robust mutexes, all over memory that is pushed out meanwhile.

use hecaton_e2e::Checked;
use std::mem::MaybeUninit;

const MUTEXES: usize = 64;

/// Bytes between two mutexes.
const APART: usize = 64 << 10;

/// Pages of other memory.
const OTHERS: usize = 12_000;

fn main() {
    let memory = vec![0u8; MUTEXES * APART + 64];
    let mutex = |i: usize| {
        let at = memory.as_ptr() as usize + i * APART;
        (at.next_multiple_of(64)) as *mut libc::pthread_mutex_t
    };
    // SAFETY: each mutex is initialised once, at a place of its own that is aligned and large
    // enough, and used as the C library says.
    unsafe {
        let mut attributes = MaybeUninit::uninit();
        libc::pthread_mutexattr_init(attributes.as_mut_ptr());
        let mut attributes = attributes.assume_init();
        libc::pthread_mutexattr_setrobust(&raw mut attributes, libc::PTHREAD_MUTEX_ROBUST);
        for i in 0..MUTEXES {
            assert_eq!(libc::pthread_mutex_init(mutex(i), &raw const attributes), 0);
        }
    }
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for i in 0..MUTEXES {
                // SAFETY: see above.
                assert_eq!(unsafe { libc::pthread_mutex_lock(mutex(i)) }, 0);
            }
            let mut others = Checked::new(1, OTHERS);
            (0..OTHERS).for_each(|page| others.write(page));
            others.verify_all();
        });
    });
    let mut soon = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: see above; the time is written first.
    let owner_died = unsafe {
        libc::clock_gettime(libc::CLOCK_REALTIME, &raw mut soon);
        soon.tv_sec += 5;
        let lock = |i: usize| libc::pthread_mutex_timedlock(mutex(i), &raw const soon);
        (0..MUTEXES).filter(|&i| lock(i) == libc::EOWNERDEAD).count()
    };
    println!("the owner of {owner_died} mutexes has ended");
}

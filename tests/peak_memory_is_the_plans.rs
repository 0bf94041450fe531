//! The whole process of `examples/custom_executor` allocates at its peak what the plan says for all its ranks, and at most 2 %
//! more: activations, actors, streams and the executor's own data included. Thread stacks are not allocations.
//!
//! `GATHERFLOW_MEMORY_MB` sets the megabytes of parameters (default 6; with 256 it takes a minute or two, and 3 GB):
//! ```text
//! GATHERFLOW_MEMORY_MB=256 cargo test --test peak_memory_is_the_plans -- --nocapture
//! ```
//! This file contains unsafe code: the allocator that counts passes calls on.
#![allow(clippy::unwrap_used)]

#[path = "../examples/custom_executor.rs"]
#[allow(dead_code)] // its command line
mod custom_executor;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use gatherflow::{Config, DType, Model, Overlap, Ranks, Storage};

struct Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

static NOW: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

fn grown(bytes: usize) {
    PEAK.fetch_max(NOW.fetch_add(bytes, Ordering::SeqCst) + bytes, Ordering::SeqCst);
}

// SAFETY: every call is passed on to the system's allocator as it is; counting allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        grown(layout.size());
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        grown(layout.size());
        // SAFETY: the caller keeps the contract of `alloc_zeroed`.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        // Both may exist for a moment.
        grown(new_size);
        NOW.fetch_sub(layout.size(), Ordering::SeqCst);
        // SAFETY: the caller keeps the contract of `realloc`; the memory came from `System`.
        unsafe { System.realloc(memory, layout, new_size) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        NOW.fetch_sub(layout.size(), Ordering::SeqCst);
        // SAFETY: the caller keeps the contract of `dealloc`; the memory came from `System`.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[test]
fn the_peak_of_the_whole_process_is_within_2_percent_of_the_plan_in_every_mode() {
    let megabytes: usize = std::env::var("GATHERFLOW_MEMORY_MB").map_or(6, |text| text.parse().unwrap());
    let width = (megabytes as f64 * 1e6 / 2.0).sqrt() as usize;
    let (ranks, size) = (2, [width, width, 1]);
    let modes = [Overlap::None, Overlap::Chain, Overlap::Window];
    for (overlap, storage) in modes.into_iter().flat_map(|mode| [(mode, Storage::Views), (mode, Storage::Shared)]) {
        let config = Config::new().num_buckets(4).overlap(overlap).storage(storage);
        let plan = {
            let mut model = Model::new();
            custom_executor::Net::register(&mut model, size).unwrap();
            assert!(model.params()[0].numel * DType::Bf16.bytes() > megabytes * 990_000);
            model.plan(ranks, &config).unwrap()
        };
        let planned = ranks * plan.memory().total_bytes();
        let before = NOW.load(Ordering::SeqCst);
        PEAK.store(before, Ordering::SeqCst);
        std::thread::scope(|scope| {
            for rank in Ranks::local(ranks).unwrap() {
                scope.spawn(|| custom_executor::run(rank, &config, 2, size).unwrap());
            }
        });
        let peak = PEAK.load(Ordering::SeqCst) - before;
        let share = peak as f64 / planned as f64;
        println!("{overlap:?}, {storage:?}: planned {planned} bytes, {peak} were allocated: {share:.5} times as many");
        assert!((1.0..1.02).contains(&share), "{overlap:?}, {storage:?}: {share}");
        let left = NOW.load(Ordering::SeqCst).saturating_sub(before);
        assert!(left < planned / 100, "{left} bytes are left after the engines are gone");
    }
}

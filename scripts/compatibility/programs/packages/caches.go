// Fills a cache of bigcache and a B-tree database of bbolt, and reads them.
package main

import (
	"context"
	"fmt"
	"os"
	"time"

	"github.com/allegro/bigcache/v3"
	"go.etcd.io/bbolt"
)

func check(err error) {
	if err != nil {
		panic(err)
	}
}

func main() {
	options := bigcache.DefaultConfig(time.Hour)
	options.Verbose, options.Shards, options.MaxEntriesInWindow = false, 64, 300000
	cache, err := bigcache.New(context.Background(), options)
	check(err)
	for i := 0; i < 300000; i++ {
		check(cache.Set(fmt.Sprint("key-", i), []byte(fmt.Sprintf("%0200d", i))))
	}
	sum := 0
	for i := 0; i < 300000; i += 3 {
		value, err := cache.Get(fmt.Sprint("key-", i))
		check(err)
		sum += int(value[199])
	}
	os.Remove("bolt")
	database, err := bbolt.Open("bolt", 0600, &bbolt.Options{NoSync: true})
	check(err)
	for begin := 0; begin < 200000; begin += 5000 {
		check(database.Update(func(tx *bbolt.Tx) error {
			bucket, err := tx.CreateBucketIfNotExists([]byte("b"))
			check(err)
			for i := begin; i < begin+5000; i++ {
				check(bucket.Put([]byte(fmt.Sprint(i*7919%200000)), []byte(fmt.Sprintf("%0100d", i))))
			}
			return nil
		}))
	}
	check(database.View(func(tx *bbolt.Tx) error {
		return tx.Bucket([]byte("b")).ForEach(func(_, value []byte) error { sum += int(value[99]); return nil })
	}))
	check(database.Close())
	fmt.Println(sum, cache.Len())
}

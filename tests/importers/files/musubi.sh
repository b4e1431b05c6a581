#!/bin/bash
# The commands of musubi-tuner's docs/qwen_image.md, with more of their options. The longest one trains.
python src/musubi_tuner/qwen_image_cache_latents.py --dataset_config musubi_dataset.toml --vae models/vae.safetensors

accelerate launch --num_cpu_threads_per_process 1 --mixed_precision bf16 src/musubi_tuner/qwen_image_train_network.py \
    --dit models/qwen_image_edit_2509_bf16.safetensors --vae models/vae.safetensors \
    --text_encoder models/qwen_2.5_vl_7b.safetensors --model_version edit-2509 --num_layers 60 \
    --dataset_config musubi_dataset.toml --config_file musubi_job \
    --sdpa --split_attn --mixed_precision bf16 --fp8_base --fp8_scaled --fp8_vl --blocks_to_swap 16 \
    --timestep_sampling qwen_shift --weighting_scheme none --sigmoid_scale 0.9 --num_timestep_buckets 10 \
    --optimizer_type adamw8bit --optimizer_args weight_decay=0.02 betas=0.9,0.99 --learning_rate 5e-5 \
    --lr_scheduler cosine --lr_warmup_steps 10% --gradient_checkpointing --gradient_accumulation_steps 2 \
    --network_module networks.lokr --network_dim 16 --network_alpha 16 --network_args factor=8 rank_dropout=0.1 \
    --max_train_steps 1000 --seed 42 --save_every_n_steps 250 --save_last_n_steps 500 --save_state \
    --sample_prompts prompts.txt --sample_every_n_steps 250 --sample_at_first --logging_dir logs \
    --max_data_loader_n_workers 2 --persistent_data_loader_workers --output_dir output --output_name my_edit \
    --huggingface_token hf_abcdef --no_such_option 3

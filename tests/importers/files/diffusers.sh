#!/bin/bash
# The command of diffusers' guide, with more of its flags.
export MODEL_NAME="stable-diffusion-v1-5/stable-diffusion-v1-5"
export INSTANCE_DIR="pictures"

accelerate launch --mixed_precision="fp16" train_dreambooth_lora.py \
  --pretrained_model_name_or_path=$MODEL_NAME \
  --instance_data_dir=${INSTANCE_DIR} \
  --instance_prompt="a photo of sks cat" \
  --with_prior_preservation --prior_loss_weight=0.9 \
  --class_data_dir="regularisation" --class_prompt="a photo of a cat" --num_class_images=200 \
  --output_dir=output \
  --resolution=512 --center_crop \
  --train_batch_size=1 --gradient_accumulation_steps=4 --gradient_checkpointing \
  --rank 8 --lora_dropout 0.05 --use_8bit_adam \
  --learning_rate=1e-4 --lr_scheduler=cosine --lr_warmup_steps=50 --adam_beta2=0.99 \
  --max_train_steps=500 --snr_gamma=5.0 \
  --checkpointing_steps=100 --checkpoints_total_limit=3 --resume_from_checkpoint latest \
  --validation_prompt="a photo of sks cat on a sofa" --validation_epochs=25 --num_validation_images 4 \
  --train_text_encoder --enable_xformers_memory_efficient_attention --allow_tf32 \
  --report_to="wandb" --push_to_hub --hub_token=hf_abcdef --seed="0" --colour=blue
